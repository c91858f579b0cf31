"""With which state a job continues that was stopped: the one that it had when its script left the loop.

After its loop a script may load its best checkpoint, or put averaged weights in, to evaluate or save these. A job that
is started again would train from there. That the script has left its loop shows when it has read ``engine.finished``
as true.
"""

from __future__ import annotations

import threading
from typing import Any

from deepspeed_bamboo.core.grid import Coordinate
from deepspeed_bamboo.runtime.checkpoint.automatic import AutomaticCheckpoints
from deepspeed_bamboo.runtime.checkpoint.beginning import ENDED, SAVES, WROTE
from deepspeed_bamboo.runtime.iteration.worker import Worker
from deepspeed_bamboo.runtime.job.news import tell
from deepspeed_bamboo.runtime.stock.state_versions import touched


class LastState:
    """One worker's part; ``checkpoints`` is None where none are taken, and then nothing is done.

    ``ending``: whether what is kept has what the script did after its last step.
    """

    def __init__(self, worker: Worker, checkpoints: AutomaticCheckpoints | None) -> None:
        self._worker = worker
        self._checkpoints = checkpoints
        self._left: dict[Coordinate, tuple[int, str]] | None = None  # what shows that the script changes a stage
        self._kept = False
        self.ending = False
        self._saved = (-1, 0)  # how often the script has saved after which step

    def note_saved(self) -> None:
        """The script has saved a checkpoint of its own."""
        step, count = self._saved
        self._saved = (self._worker.step, count + 1 if step == self._worker.step else 1)

    def to_json(self, *, wrote: bool) -> dict[str, Any]:
        """What the state that is being kept has of what the script did after its last step."""
        step, count = self._saved
        return {ENDED: self.ending, SAVES: count if step == self._worker.step else 0, WROTE: wrote}

    def note(self, stopped: bool) -> bool:
        """The script asks whether the job was ``stopped``, and is told so."""
        here = threading.current_thread() is threading.main_thread()
        if stopped and here and self._left is None and self._checkpoints is not None:
            self._left = self._touched()
        return stopped

    def keep_before_load(self, *, stopped: bool) -> None:
        """Of a stopped job whose script has left its loop, the state of before is kept, once; collective."""
        if not stopped or self._kept or self._checkpoints is None:
            return
        if any(self._worker.agree_on("left", lambda: self._left is not None).values()):
            self._keep(self._checkpoints)

    def keep_at_close(self) -> None:
        """The script has ended; collective."""
        if self._checkpoints is not None and not self._kept:
            self._keep(self._checkpoints)

    def _keep(self, checkpoints: AutomaticCheckpoints) -> None:
        now, left = self._touched(), self._left or {}
        if changed := sorted(str(c) for c, was in left.items() if c in now and now[c] != was):
            tell(
                self._worker,
                f"since engine.finished was true the script has changed weights or optimizer state of "
                f"{' '.join(changed)}, and this is kept as the job's last state: started again, the job trains from "
                "there. If that is not meant (averaged weights for an evaluation, say), write the old ones back before "
                "the script ends, or save the others and load them in a script of their own",
            )
        self.ending, self._kept = True, True
        checkpoints.finish()

    def _touched(self) -> dict[Coordinate, tuple[int, str]]:
        return {coordinate: touched(replica) for coordinate, replica in self._worker.host.owned.items()}
