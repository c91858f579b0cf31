"""``ds_bamboo status --watch``: a live screen on a terminal, lines of what is new elsewhere, or JSON lines."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from deepspeed_bamboo.cli.job_view import JobView, look
from deepspeed_bamboo.cli.status_screen import news, screen
from deepspeed_bamboo.coordination import CoordinatorUnavailable, JobCoordinator

if TYPE_CHECKING:
    from rich.live import Live

_WATCH_SECONDS = 1.0
_ALARMING = ("silent", "dead", "failed", "overdue", "stood still", "is slow", "is being left", "leaving")


class Display(Protocol):
    """Something that shows a job."""

    def show(self, view: JobView) -> None:
        """Show the job as it is now."""

    def away(self, seconds: float, error: CoordinatorUnavailable) -> None:
        """Say that etcd has not answered for so long, with ``error``."""


def watch(coordinator: JobCoordinator, *, as_json: bool, external: bool) -> int:
    """Show the job until it is over, its own etcd is gone, or the user has seen enough. Returns the exit code.

    An ``external`` etcd may not answer for a while; the job trains on then.
    """
    with contextlib.suppress(KeyboardInterrupt), _display(as_json=as_json) as display:
        away_since = 0.0
        while True:
            try:
                view = look(coordinator)
            except CoordinatorUnavailable as error:
                if not external:
                    print(f"ds_bamboo: the job's own etcd is gone, and the job with it: {error}", file=sys.stderr)
                    return 1
                away_since = away_since or time.monotonic()
                display.away(time.monotonic() - away_since, error)
            else:
                away_since = 0.0
                display.show(view)
                if view.over:
                    return 0
            time.sleep(_WATCH_SECONDS)
    return 0


def terminal_cells() -> int | None:
    """The width of the terminal; None where the output is not a terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


@contextmanager
def _display(*, as_json: bool) -> Iterator[Display]:
    if as_json:
        yield JsonLines()
    elif not sys.stdout.isatty():
        yield PlainLines()
    else:
        from rich.live import Live

        with Live(auto_refresh=False, vertical_overflow="crop") as live:
            yield Screen(live)


class JsonLines:
    """One JSON value a second."""

    def show(self, view: JobView) -> None:
        print(json.dumps(view.to_json()), flush=True)

    def away(self, seconds: float, error: CoordinatorUnavailable) -> None:
        print(json.dumps({"unavailable": str(error)}), flush=True)


class PlainLines:
    """What is new, one line after the other: for a file, or a pipe."""

    def __init__(self) -> None:
        self._before: JobView | None = None
        self._is_away = False

    def show(self, view: JobView) -> None:
        for line in news(self._before, view):
            print(line, flush=True)
        self._before, self._is_away = view, False

    def away(self, seconds: float, error: CoordinatorUnavailable) -> None:
        if not self._is_away:
            print(f"etcd does not answer ({error}); the job trains on without it", flush=True)
        self._is_away = True


class Screen:
    """One screen in place of the one before."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._before: JobView | None = None

    def show(self, view: JobView) -> None:
        self._before = view
        self._draw([])

    def away(self, seconds: float, error: CoordinatorUnavailable) -> None:
        self._draw([f"etcd has not answered for {seconds:.0f} s; the job trains on without it. It was:"])

    def _draw(self, first: list[str]) -> None:
        from rich.text import Text

        cells, rows = shutil.get_terminal_size()
        room = rows - 1 - len(first)  # the last line stays free, so that nothing scrolls
        shown = [] if self._before is None else screen(self._before, cells=cells, rows=room)
        text = Text("\n".join([*first, *shown]), no_wrap=True, overflow="crop")
        text.highlight_words(_ALARMING, style="bold red")
        self._live.update(text, refresh=True)
