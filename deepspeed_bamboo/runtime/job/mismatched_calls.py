"""Finds workers that wait for each other in different calls: a bug of the script that no worker can see alone.

A worker that leaves the loop early while the others train, or a checkpoint that only the first rank saves, would
otherwise hang for ever: nobody is lost.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from deepspeed_bamboo.coordination import CoordinatorUnavailable, JobCoordinator, JobFailure

# A shorter call is not reported; a longer one costs one write and one read of etcd.
_LOOK_SECONDS = 5.0

_CALLS = {
    "train": "train_batch",
    "settle": "train_batch",
    "data": "train_batch",
    "evaluation position": "eval_batch",
    "evaluate": "eval_batch",
    "save": "save_checkpoint",
    "latest": "save_checkpoint",
    "checkpoints there": "load_checkpoint",
    "checkpoint checked": "load_checkpoint",
    "load": "load_checkpoint",
    "refresh": "refresh_shadows",
    "digest": "state_digest",
    "barrier": "barrier",
    "whole state": "whole_state_dict",
    "user collective": "a collective of torch.distributed, with which save_checkpoint begins, too",
    "close": "at the end of the script",
}

logger = logging.getLogger(__name__)


class Where(NamedTuple):
    """A worker's activity: its kind, and its number in the epoch, which is the same on all workers."""

    epoch: int
    number: int
    kind: str


class Whereabouts:
    """Looks, now and then and in a thread of its own, at where this worker has been for long, and where the others are.

    The later of two workers that wait in different calls finds the earlier one's word, and ends the job with it.
    """

    def __init__(self, coordinator: JobCoordinator, *, worker: str, where: Callable[[], Where | None]) -> None:
        """``where`` says in which activity this worker is; None outside of any."""
        self._coordinator = coordinator
        self._worker = worker
        self._where = where
        self._before: Where | None = None
        self._told: Where | None = None
        self._closed = threading.Event()

    def start(self) -> None:
        """Look every few seconds from now on."""
        threading.Thread(target=self._run, name="bamboo-whereabouts", daemon=True).start()

    def close(self) -> None:
        """Look no more. Does not wait."""
        self._closed.set()

    def look(self) -> None:
        """Tell where this worker is if it was there at the last look, too, and compare that with what others told."""
        here = self._where()
        before, self._before = self._before, here
        if here is None or here != before or here == self._told:
            return
        try:
            self._coordinator.publish_whereabouts(self._worker, here._asdict())
            self._told = here
            others = self._coordinator.whereabouts()
            text = contradiction(here, {**others, self._worker: here._asdict()})
            if text is not None and self._where() == here:
                self._coordinator.fail(JobFailure(self._worker, "user_error", text, text))
        except CoordinatorUnavailable as error:
            self._told = None
            logger.info("whereabouts not compared: %s", error)

    def _run(self) -> None:
        while not self._closed.wait(_LOOK_SECONDS):
            self.look()


def contradiction(here: Where, told: Mapping[str, Mapping[str, Any]]) -> str | None:
    """What to say when workers are in other calls than ``here`` in the same place of the job; None when none is."""
    by_kind: dict[str, list[str]] = defaultdict(list)
    for worker, place in sorted(told.items()):
        if (place["epoch"], place["number"]) == (here.epoch, here.number):
            by_kind[place["kind"]].append(worker)
    if len(by_kind) < 2:
        return None
    parties = [f"{', '.join(workers)}: {_CALLS.get(kind, kind)}" for kind, workers in sorted(by_kind.items())]
    return (
        f"the workers wait for each other in different calls ({'; '.join(parties)}); every rank must make the same "
        "calls in the same order, so look for one that is made, or left out, on some ranks only"
    )
