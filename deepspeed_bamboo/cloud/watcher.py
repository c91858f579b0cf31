"""The thread that asks a source for notices as long as the job lives."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from deepspeed_bamboo.cloud.errors import MetadataError
from deepspeed_bamboo.cloud.notice import Notice, NoticeSource

logger = logging.getLogger(__name__)

_FIRST_PAUSE_SECONDS = 1.0
_STOP_SECONDS = 1.0


class NoticeWatcher:
    """Calls ``on_notice`` from a thread of its own, once for each notice.

    A notice that the source keeps reporting is passed on once; one that disappeared and came back is passed
    on again. If ``on_notice`` raises, the notice is told again after a pause, until it was taken: a
    coordinator that can't be reached just now loses nothing. Nothing is ever raised out of the thread.
    A source that fails is asked again after a pause that doubles up to ``longest_pause_seconds``; a
    problem is logged when it first comes and when it changes, not each time.
    """

    def __init__(
        self,
        source: NoticeSource,
        on_notice: Callable[[Notice], None],
        *,
        first_pause_seconds: float = _FIRST_PAUSE_SECONDS,
        longest_pause_seconds: float = 10.0,
        interval_seconds: float | None = None,
    ) -> None:
        """``interval_seconds``: how long to wait between two questions; None for what the source recommends."""
        self._source = source
        self._interval_seconds = source.interval_seconds if interval_seconds is None else interval_seconds
        self._on_notice = on_notice
        self._first_pause_seconds = first_pause_seconds
        self._longest_pause_seconds = longest_pause_seconds
        self._pause_seconds = first_pause_seconds
        self._problem = ""
        self._seen: set[tuple[str, str, str]] = set()
        self._untold: list[Notice] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"bamboo-notices-{source.name}", daemon=True)

    def start(self) -> NoticeWatcher:
        """Begin, and return this watcher. At most once."""
        self._thread.start()
        return self

    def stop(self) -> bool:
        """End within a second. True unless the thread is still busy: then in ``on_notice``, which isn't interrupted."""
        self._stop.set()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(_STOP_SECONDS)
        return not self._thread.is_alive() or self._thread is threading.current_thread()

    def __enter__(self) -> NoticeWatcher:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _run(self) -> None:
        while not self._stop.is_set():
            problem = "; ".join(text for text in (self._ask(), self._tell()) if text)
            if self._stop.is_set():
                return
            self._report(problem)
            self._stop.wait(self._next_pause_seconds(problem))

    def _ask(self) -> str:
        """Ask the source. Return what went wrong, or an empty text."""
        try:
            self._note(self._source.poll(self._stop))
        except MetadataError as error:
            return str(error)
        except Exception as error:  # noqa: BLE001 - a bug in a source must not end the watch; it is logged
            return f"{type(error).__name__}: {error}"
        return ""

    def _note(self, notices: Sequence[Notice]) -> None:
        self._untold += [notice for notice in notices if notice.identity not in self._seen]
        self._seen = {notice.identity for notice in notices}

    def _tell(self) -> str:
        """Hand on what wasn't taken yet, in order. Return what went wrong, or an empty text."""
        while self._untold and not self._stop.is_set():
            try:
                self._on_notice(self._untold[0])
            except Exception as error:  # noqa: BLE001 - told again after a pause; it is logged
                return f"the notice could not be handed on ({type(error).__name__}: {error})"
            del self._untold[0]
        return ""

    def _report(self, problem: str) -> None:
        if problem == self._problem:
            return
        if problem:
            logger.warning("notices from %s: %s; trying again; training continues", self._source.name, problem)
        else:
            logger.info("notices from %s: all well again", self._source.name)
        self._problem = problem

    def _next_pause_seconds(self, problem: str) -> float:
        if not problem:
            self._pause_seconds = self._first_pause_seconds
            return self._interval_seconds
        pause_seconds = self._pause_seconds
        self._pause_seconds = min(2 * pause_seconds, self._longest_pause_seconds)
        return pause_seconds
