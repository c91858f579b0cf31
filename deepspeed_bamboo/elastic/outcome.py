"""How the slots of a command have started and ended, for ``ds_bamboo run``, which started the command.

DeepSpeed's launchers end with exit codes that say little: 0 when a node's launcher was killed, 247 when an agent was.
So every slot leaves a note in the folder that BAMBOO_OUTCOME names: one line when it begins, another when it ends. A
slot that was killed leaves the first alone.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from deepspeed_bamboo.coordination.process_state import process_state
from deepspeed_bamboo.protocol import OUTCOME

BEGUN, PLAIN, REFUSED, FINISHED, LEFT = "begun", "plain", "refused", "finished", "left"
NOT_YET = "not_yet"


@dataclass(frozen=True)
class SlotNote:
    """The last note of one slot.

    ``how``: begun (and no more: it was killed), plain (the plugin is off there), refused (it could not start),
    not_yet (nor could this one, but a moment later it may), finished, left (it was drained, or had no part in the job
    any more), or the kind of the job's failure. ``code``:
    what it ended with; ``step``: as far as its worker has come, as known to its agent.
    """

    how: str
    code: int = 0
    step: int = -1
    message: str = ""


class OutcomeNote:
    """A slot's side. Without a wrapper, hence without BAMBOO_OUTCOME, nothing is written."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        folder = environment.get(OUTCOME)
        self._file = None if not folder else Path(folder) / f"slot-{os.getpid()}"

    def write(self, note: SlotNote) -> None:
        """Write a note, which replaces the one before."""
        if self._file is not None:
            with contextlib.suppress(OSError), self._file.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(asdict(note)) + "\n")


def read_notes(folder: Path) -> list[SlotNote]:
    """The last notes of all slots."""
    found = []
    for file in sorted(folder.glob("slot-*")):
        lines = file.read_text(encoding="utf-8").splitlines()
        with contextlib.suppress(ValueError, TypeError, IndexError):
            found.append(SlotNote(**json.loads(lines[-1])))
    return found


def slots_running(folder: Path) -> bool:
    """Whether a slot that has begun still runs."""
    pids = [int(file.name.removeprefix("slot-")) for file in folder.glob("slot-*")]
    return any(process_state(pid) not in ("", "Z", "X") for pid in pids)
