"""A thread reports what takes long in a worker, in its log and to ``ds_bamboo status``."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from deepspeed_bamboo import news
from deepspeed_bamboo.coordination import CoordinatorUnavailable, JobCoordinator
from deepspeed_bamboo.long_work import FIRST_SECONDS, LongWork, pause_seconds


@dataclass
class _Open:
    """One work, whether it has ended, and whether it ended well."""

    work: LongWork
    ended: threading.Event = field(default_factory=threading.Event)
    well: bool = False


class LongWorks:
    """Tells of the long work of one worker. What is done within ``first_seconds`` is never mentioned."""

    def __init__(
        self,
        coordinator: JobCoordinator,
        *,
        worker: str,
        first_seconds: float = FIRST_SECONDS,
        say: Callable[[str], None] | None = None,
    ) -> None:
        """``say``: prints a line (default: to stderr, under the worker's name)."""
        self._coordinator = coordinator
        self._worker = worker
        self._first_seconds = first_seconds
        self._say = partial(news.tell, who=worker) if say is None else say

    @contextmanager
    def watch(self, what: str, *, total: int | None = None, unit: str = "bytes") -> Iterator[LongWork]:
        """Inside, ``what`` is done; count it with the value's ``add``. Neither entering nor leaving ever waits."""
        opened = _Open(LongWork(what, total=total, unit=unit))
        threading.Thread(target=self._tell, args=(opened,), name="bamboo-progress", daemon=True).start()
        try:
            yield opened.work
            opened.well = True
        finally:
            opened.ended.set()

    @contextmanager
    def watch_bytes(self, what: str, total: int) -> Iterator[Callable[[int], None]]:
        """As :meth:`watch`, for so many bytes; the value counts them."""
        with self.watch(what, total=total) as work:
            yield work.add

    def _tell(self, opened: _Open) -> None:
        told = False
        while True:
            age = opened.work.facts().seconds
            if opened.ended.wait(pause_seconds(age, first_seconds=self._first_seconds)):
                break
            told = True
            facts = opened.work.facts()
            self._say(facts.in_words())
            self._publish(facts.to_json())
        if told:
            if opened.well:
                self._say(opened.work.facts().at_the_end())
            self._publish(None)

    def _publish(self, facts: dict[str, Any] | None) -> None:
        with contextlib.suppress(CoordinatorUnavailable):
            self._coordinator.publish_work(self._worker, facts)
