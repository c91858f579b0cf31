"""What a script's own checkpoint would have it continue with: read for a script whose job is beyond that already.

A script may save its progress itself, and load the newest of that when it begins. In a job that continues from
``checkpoint.dir``, and on a late worker, the state comes from elsewhere. But the script needs what it saved with it to
begin its loop where that belongs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepspeed_bamboo.errors import CheckpointError
from deepspeed_bamboo.runtime.checkpoint.beginning import LEFT_OUT, SAVED_CALL, Loaded
from deepspeed_bamboo.storage.checking import LATEST

# DeepSpeed's own, which its load_checkpoint does not return either.
_COUNTS = frozenset({"sparse_tensor_module_names", "skipped_steps", "global_steps", "dp_world_size", "mp_world_size"})
_MODULE_ONLY_AT = 3  # of stock's arguments after the tag


@dataclass(frozen=True)
class Asked:
    """What a script has asked ``load_checkpoint`` for; ``load`` does it. ``whole``: not for weights alone."""

    folder: str
    tag: str | None
    whole: bool
    load: Callable[[], Loaded]

    @classmethod
    def of(
        cls,
        folder: Any,
        tag: Any,
        arguments: tuple[Any, ...],
        options: dict[str, Any],
        load: Callable[[], Loaded],
    ) -> Asked:
        """``arguments`` and ``options`` are those of stock's method behind the tag."""
        given = arguments[_MODULE_ONLY_AT] if len(arguments) > _MODULE_ONLY_AT else False
        alone = bool(options.get("load_module_only", given))
        return cls(str(folder), None if tag is None else str(tag), not alone, load)

    @property
    def wanted(self) -> str:
        """Equal for two loads of the same: by folder and tag as the script names them, and whether of weights alone."""
        return json.dumps([os.path.normpath(self.folder), self.tag, self.whole])


@dataclass(frozen=True)
class Resume:
    """A checkpoint that the script saved at ``step``: what ``load_checkpoint`` would return of it.

    ``call``: the number of the call before which it was saved; None where it doesn't say.
    """

    path: str
    step: int
    client_state: dict[str, Any]
    call: int | None = None


def latest_in(folder: str) -> str | None:
    """The tag that the file ``latest`` names; None where there is none."""
    file = Path(folder) / LATEST
    return file.read_text(encoding="utf-8").strip() if file.is_file() else None


def resume_of(folder: str, tag: str, *, read: Callable[..., Any]) -> Resume:
    """What loading checkpoint ``tag`` in ``folder`` would return. Raises CheckpointError for what is none."""
    path = Path(folder) / tag / "mp_rank_00_model_states.pt"
    if not path.is_file():
        raise CheckpointError(f"{str(path)!r} is not there: checkpoint {tag!r} is incomplete; pass another tag")
    found = read(str(path), map_location="cpu")
    if not isinstance(found, dict) or not isinstance(found.get("global_steps"), int):
        raise CheckpointError(f"{str(path)!r} is no file of a pipeline's checkpoint; pass the tag of another one")
    kept = {name: value for name, value in found.items() if name not in LEFT_OUT | _COUNTS}
    call = found.get(SAVED_CALL)
    return Resume(str(path), found["global_steps"], kept, call if isinstance(call, int) else None)
