"""The place where one job keeps its checkpoints: whose it is, which checkpoint is the last, which may go.

bamboo.json          the job that writes here
latest               the tag of the last complete checkpoint, as DeepSpeed has it
bamboo_step<N>/      a checkpoint in DeepSpeed's files, after N steps
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path

from deepspeed_bamboo.errors import CheckpointError
from deepspeed_bamboo.storage.folders import Fill, Folder

_OWNER = "bamboo.json"
_LATEST = "latest"
_TAG = re.compile(r"bamboo_step(\d+)")
_LOOK_SECONDS = 0.2


class CheckpointPlace:
    """What ``owner``, a job, does with ``folder``, which people call ``name``. All raise CheckpointError."""

    def __init__(self, folder: Folder, *, name: str, owner: str) -> None:
        self._folder = folder
        self._owner = owner
        self.name = name

    def take(self) -> None:
        """From now on the place is this job's; another one that wrote here can't name checkpoints any more."""
        self._folder.write(_OWNER, _text(self._owner))

    def last(self, *, worker: str, within_seconds: float = 5.0) -> str | None:
        """The tag of the last checkpoint, seen from ``worker``'s machine; None: there is none.

        Raises CheckpointError when this job's mark does not appear here: others see another place. A file that
        another machine has written may take so long.
        """
        deadline = time.monotonic() + within_seconds
        while (owner := self._folder.read_text(_OWNER)) != self._owner:
            if time.monotonic() >= deadline:
                raise CheckpointError(
                    f"bamboo.checkpoint.dir is {self.name!r}, and to worker {worker} the file {_OWNER} there says "
                    f"{owner!r}, not {self._owner!r}, as the first worker has written; it must be a directory that all "
                    "machines see, or s3://bucket/prefix, and this job's alone"
                )
            time.sleep(_LOOK_SECONDS)
        return (self._folder.read_text(_LATEST) or "").strip() or None

    def write(self, name: str, fill: Fill) -> None:
        """Make a file of a checkpoint."""
        self._folder.write(name, fill)

    def discard(self, steps: Iterable[int]) -> None:
        """Remove what there is of checkpoints that were given up; it may fill a disk that has room for a whole one."""
        there = set(self._folder.folders())
        for tag in [tag_of(step) for step in sorted(steps)]:
            if tag in there:
                self._folder.remove(tag)

    def name_last(self, step: int) -> None:
        """Make the checkpoint of ``step``, whose files are all there, the last one.

        Removes this plugin's older ones, but for the one that was the last until now. Never goes back. Raises
        CheckpointError when another job has taken the place.
        """
        owner = self._folder.read_text(_OWNER)
        if owner != self._owner:
            raise CheckpointError(
                f"{self.name!r} is another job's by now ({_OWNER} says {owner!r}), so this job's checkpoints don't "
                "count there any more; give each job a directory of its own"
            )
        before = (self._folder.read_text(_LATEST) or "").strip()
        named = _TAG.fullmatch(before)
        if named and int(named[1]) > step:
            return  # by a reporter that has taken over from this one
        self._folder.write(_LATEST, _text(tag_of(step)))
        for old in self._folder.folders():
            found = _TAG.fullmatch(old)
            if found and int(found[1]) < step and old != before:
                self._folder.remove(old)

    def local(self, tag: str) -> AbstractContextManager[Path]:
        """Inside the block: a directory of this machine in which the checkpoint ``tag`` is."""
        return self._folder.local(tag)


def tag_of(step: int) -> str:
    """What the checkpoint of ``step`` is called. Scripts that save here, too, use other names."""
    return f"bamboo_step{step}"


def _text(text: str) -> Fill:
    return lambda file: file.write(text.encode("utf-8"))
