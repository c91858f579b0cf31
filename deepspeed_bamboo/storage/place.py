"""The place where one job keeps its checkpoints: whose it is, which checkpoint is the last, which may go.

bamboo.json          the job that writes here
latest               the tag of the last complete checkpoint, as DeepSpeed has it
bamboo_step<N>/      a checkpoint in DeepSpeed's files, after N steps, with its manifest (``storage/manifest.py``)
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from deepspeed_bamboo.core.checkpointing import FileFact, removable
from deepspeed_bamboo.errors import CheckpointError
from deepspeed_bamboo.storage.checking import (
    LATEST,
    Candidate,
    Choice,
    Survey,
    candidate_of,
    is_intact,
    problems_of,
    share_bytes,
    strangers,
    survey,
)
from deepspeed_bamboo.storage.folders import Fill, Folder, OnBytes, ignore_bytes
from deepspeed_bamboo.storage.manifest import NAMES, Manifest, MeasuredFile

_OWNER = "bamboo.json"
JOB, STARTED = "job", "started_seconds"
"""What the mark of a job says: its name, and the time at which it was started; None where that isn't known."""
_TAG = re.compile(r"bamboo_step(\d{1,15})")
_LOOK_SECONDS = 0.2


Watch = Callable[[str, int], AbstractContextManager[OnBytes]]
"""Called with a description and the number of bytes; inside, its value counts them."""


@contextmanager
def unwatched(what: str, total: int) -> Iterator[OnBytes]:
    """Reports nothing."""
    yield ignore_bytes


class CheckpointPlace:
    """What ``owner``, a job, does with ``folder``, which people call ``name``. All raise CheckpointError."""

    def __init__(self, folder: Folder, *, name: str, owner: str, watch: Watch = unwatched) -> None:
        """``watch``: reports the progress of long work."""
        self._folder = folder
        self._owner = owner
        self._watch = watch
        self.name = name

    def take(self) -> None:
        """Claim the place for this job. A job that wrote here before can't name checkpoints any more.

        Workers of a job that starts anew have the place already. Then nothing is written, so that a disk which has
        become full or read-only does not keep them from what they can read.
        """
        if not self._is_mark(self._folder.read_text(_OWNER)):
            self._folder.write(_OWNER, _text(self._owner))

    def check_visible(self, *, worker: str, within_seconds: float = 5.0) -> None:
        """Raise CheckpointError if ``worker``'s machine does not see this job's mark: then it sees another place.

        A file that another machine has written may take so long.
        """
        deadline = time.monotonic() + within_seconds
        while not self._is_mark(owner := self._folder.read_text(_OWNER)):
            if time.monotonic() >= deadline:
                raise CheckpointError(
                    f"bamboo.checkpoint.dir is {self.name!r}, and to worker {worker} the file {_OWNER} there says "
                    f"{owner!r}, not {self._owner!r}, as the first worker has written; it must be a directory that all "
                    "machines see, or s3://bucket/prefix, and this job's alone"
                )
            time.sleep(_LOOK_SECONDS)

    def _is_mark(self, found: str | None) -> bool:
        """Whether ``found`` is this job's. Where nobody could say when it was started, its name decides, and it counts.

        So it is for a worker that joins after an etcd came back without its data.
        """
        if found is None or found == self._owner:
            return found is not None
        own, other = _mark_in(self._owner), _mark_in(found)
        if own is None or other is None or own.get(STARTED, 0) is not None or own.get(JOB) != other.get(JOB):
            return False
        self._owner = found
        return True

    def survey(self) -> Survey:
        """The checkpoints that there are, as their manifests show them; reads no state."""
        return survey(self._folder, step_of=step_of)

    def problems_of(self, candidate: Candidate, *, share: tuple[int, int] = (0, 1)) -> list[str] | None:
        """What is wrong with a share of the files of ``candidate``, see :func:`problems_of`."""
        total = share_bytes(candidate, share=share)
        with self._watch(f"checking checkpoint {candidate.tag}", total) as on_bytes:
            return problems_of(self._folder, candidate, share=share, on_bytes=on_bytes)

    def known_whole(self, choice: Choice) -> tuple[int, ...]:
        """The steps of the checkpoints that count as whole when a job continues from ``choice``, in order.

        That one and those before it with a manifest and all files in their sizes. None if ``choice`` could not be
        verified: then nothing of before is removed until this job has written enough itself.
        """
        last = step_of(choice.tag or "")
        if last is None or not choice.verified:
            return ()
        steps = [step for tag in self._folder.folders() if (step := step_of(tag)) is not None and step < last]
        return (*sorted(step for step in steps if is_intact(self._folder, tag_of(step))), last)

    def write(self, name: str, fill: Fill) -> FileFact:
        """Make a file of a checkpoint; returns what was written into it."""
        measured: list[MeasuredFile] = []

        def fill_and_measure(file: BinaryIO) -> None:
            measured.append(MeasuredFile(file))
            fill(measured[-1])  # type: ignore[arg-type]

        self._folder.write(name, fill_and_measure)
        return measured[-1].fact()

    def discard(self, steps: Iterable[int]) -> None:
        """Remove what there is of checkpoints that were given up; it may fill a disk that has room for a whole one.

        One that has a manifest stays: it was completed, whoever gave it up.
        """
        there = set(self._folder.folders())
        for tag in [tag_of(step) for step in sorted(steps)]:
            if tag in there and candidate_of(self._folder, tag) == Candidate(tag):
                self._folder.remove(tag)

    def point_to(self, choice: Choice) -> None:
        """Have ``latest`` name what was chosen, so that later ones count as newer; nothing else changes."""
        if choice.tag is not None and (self._folder.read_text(LATEST) or "").strip() != choice.tag:
            self._folder.write(LATEST, _text(choice.tag))

    def name_last(self, manifest: Manifest, *, kept: Iterable[int], keep: int, over: Collection[int] = ()) -> str:
        """Make the checkpoint of ``manifest``, whose files are all there, the last one.

        Never goes back, but for those of the steps in ``over``, from before the script went back.

        Then removes older ones, but for the newest ``keep`` of ``kept`` (the steps of those that are known to be whole)
        and itself. Returns why nothing was removed, if something was to be; "": nothing is wrong. Raises
        CheckpointError when another job has taken the place.
        """
        owner = self._folder.read_text(_OWNER)
        if owner != self._owner:
            raise CheckpointError(
                f"{self.name!r} has been taken by another job ({_OWNER} says {owner!r}), so this job can't keep "
                "checkpoints there any more; give each job a directory of its own"
            )
        named = step_of((self._folder.read_text(LATEST) or "").strip())
        for name in strangers(self._folder.sizes(manifest.tag), manifest):
            self._folder.remove_file(f"{manifest.tag}/{name}")  # of an earlier job that came to this step
        for name in NAMES:
            self._folder.write(f"{manifest.tag}/{name}", _text(manifest.to_text()))
        if named is not None and named > manifest.step and named not in over:
            return ""  # by a reporter that has taken over from this one
        self._folder.write(LATEST, _text(manifest.tag))
        return self._remove_older((*kept, manifest.step), keep=keep)

    def _remove_older(self, kept: Iterable[int], *, keep: int) -> str:
        there = [step for tag in self._folder.folders() if (step := step_of(tag)) is not None]
        kept = tuple(kept)
        leave = removable(there, kept=kept, keep=keep)
        if not leave:
            return ""
        broken = [tag_of(step) for step in sorted(kept)[-keep:] if not is_intact(self._folder, tag_of(step))]
        if broken:
            old = ", ".join(map(tag_of, leave))
            return f"{', '.join(broken)} in {self.name} is not whole any more, so {old} stays"
        for step in leave:
            self._folder.remove(tag_of(step))
        return ""

    @contextmanager
    def local(self, tag: str) -> Iterator[Path]:
        """Inside the block: a directory of this machine in which the checkpoint ``tag`` is."""
        with ExitStack() as opened:
            total = sum(self._folder.sizes(tag).values())
            with self._watch(f"copying checkpoint {tag} to this machine", total) as on_bytes:
                directory = opened.enter_context(self._folder.local(tag, on_bytes=on_bytes))
            yield directory


def tag_of(step: int) -> str:
    """What the checkpoint of ``step`` is called. Scripts that save here, too, use other names."""
    return f"bamboo_step{step}"


def step_of(tag: str) -> int | None:
    """Inverse of :func:`tag_of`; None for any other text."""
    found = _TAG.fullmatch(tag)
    return int(found[1]) if found and tag == tag_of(int(found[1])) else None


def _mark_in(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _text(text: str) -> Fill:
    return lambda file: file.write(text.encode("utf-8"))
