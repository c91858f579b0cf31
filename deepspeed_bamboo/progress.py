"""A training script's progress: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

_LINES_WITHOUT_TERMINAL = 20


class Progress:
    """Shows steps done, loss, samples per second and epoch. Draws nothing before the first ``show``."""

    def __init__(self, *, total: int, first: int = 0, stream: TextIO | None = None) -> None:
        """``total``: the step to train to. ``first``: steps done before. ``stream``: default is stdout."""
        self._total = total
        self._first = first
        self._stream = sys.stdout if stream is None else stream
        self._every = max(1, total // _LINES_WITHOUT_TERMINAL)
        self._bar = _bar(self._stream) if self._stream.isatty() else None
        self._task = None if self._bar is None else self._bar.add_task("steps", total=total, completed=first, text="")
        self._started = False

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None and self._started:
            self._bar.stop()

    def show(self, *, done: int, loss: float, samples_per_second: float, epoch: int, news: Iterable[str] = ()) -> None:
        """Say that ``done`` steps are done; each of ``news`` is printed as a line of its own first.

        Steps are named as everywhere, from 0 on: the first line is of step 0.
        """
        text = f"loss {loss:.4f}  {samples_per_second:.0f} samples/s  epoch {epoch}"
        if self._bar is None or self._task is None:
            for line in news:
                print(line, file=self._stream, flush=True)
            if done in (self._first + 1, self._total) or done % self._every == 0:
                print(f"step {done - 1}  {text}  {done}/{self._total} done", file=self._stream, flush=True)
            return
        if not self._started:
            self._bar.start()
            self._started = True
        for line in news:
            self._bar.console.print(line, highlight=False)
        self._bar.update(self._task, completed=done, text=text)


def _bar(stream: TextIO) -> RichProgress:
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("done  {task.fields[text]}"), TimeRemainingColumn())
    return RichProgress(*columns, console=Console(file=stream))
