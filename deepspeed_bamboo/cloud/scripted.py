"""Notices by script, for tests and demonstrations: after a time, at an event, or by a call."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepspeed_bamboo.cloud.notice import KINDS, Notice, NoticeKind
from deepspeed_bamboo.errors import ConfigError

_WAIT_SECONDS = 0.25
_KEYS = ("after_seconds", "at_event", "seconds", "kind", "reason")


@dataclass(frozen=True)
class ScriptedNotice:
    """One line of a script: when the notice comes, and how many ``seconds`` later the node goes (None: never).

    Exactly one of ``after_seconds`` (since the first poll) and ``at_event`` (the first time that
    :meth:`ScriptedSource.happened` is called with that name) is set.
    """

    seconds: float | None
    after_seconds: float | None = None
    at_event: str | None = None
    kind: NoticeKind = "preemption"
    reason: str = "scripted"


class ScriptedSource:
    """Tells every notice of a script once. Thread-safe; wakes at once for events."""

    name = "scripted"
    interval_seconds = 0.0  # poll waits itself

    def __init__(self, script: Sequence[ScriptedNotice] = (), *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._news = threading.Condition()
        self._waiting = list(script)
        self._due: list[Notice] = []
        self._told = 0
        self._started_at_seconds: float | None = None

    def happened(self, event: str) -> None:
        """Whatever the script has for ``event`` comes now."""
        with self._news:
            due = [line for line in self._waiting if line.at_event == event]
            self._waiting = [line for line in self._waiting if line.at_event != event]
            self._due += [self._notice(line) for line in due]
            self._news.notify_all()

    def give(self, *, seconds: float | None, reason: str, kind: NoticeKind = "preemption") -> None:
        """A notice comes now; the node goes in ``seconds``. What a fault with the signal NOTICE does."""
        with self._news:
            self._due.append(self._notice(ScriptedNotice(seconds, kind=kind, reason=reason)))
            self._news.notify_all()

    def poll(self, stop: threading.Event) -> Sequence[Notice]:
        """Wait a quarter of a second at most for what is due; never raises."""
        with self._news:
            now = self._clock()
            start = self._started_at_seconds = now if self._started_at_seconds is None else self._started_at_seconds
            times = [start + line.after_seconds for line in self._waiting if line.after_seconds is not None]
            if not self._due and not stop.is_set():
                self._news.wait(min([_WAIT_SECONDS, *(max(0.0, moment - now) for moment in times)]))
            passed = self._clock() - start
            due = [line for line in self._waiting if line.after_seconds is not None and line.after_seconds <= passed]
            self._waiting = [line for line in self._waiting if line not in due]
            notices = self._due + [self._notice(line) for line in due]
            self._due = []
            return notices

    def _notice(self, line: ScriptedNotice) -> Notice:
        deadline = None if line.seconds is None else self._clock() + line.seconds
        self._told += 1  # the number tells notices apart that say the same
        return Notice(line.kind, deadline, f"{line.reason} (notice {self._told})", self.name)


def parse_script(value: object, *, where: str = "BAMBOO_NOTICES") -> tuple[ScriptedNotice, ...]:
    """Read ``[{"after_seconds": 5, "seconds": 30}, {"at_event": "joined", "seconds": 30}]``.

    Each object has ``after_seconds`` or ``at_event``, ``seconds`` (how long until the node goes; may be
    left out for kind ``rebalance``), and maybe ``kind`` and ``reason``. Raises ConfigError with every problem.
    """
    if not isinstance(value, list | tuple):
        raise ConfigError(f"got {value!r}, but notices are a list of objects; put it in [ ]", where=where)
    problems = [f"notice {number}: {text}" for number, item in enumerate(value) for text in _problems(item)]
    if problems:
        raise ConfigError(*problems, where=where)
    return tuple(ScriptedNotice(**{"seconds": None, **item}) for item in value)


def load_script(text: str, *, where: str = "BAMBOO_NOTICES") -> tuple[ScriptedNotice, ...]:
    """Read the list form itself, or the JSON file of that name. Raises ConfigError that names ``where``."""
    try:
        content = text if text.lstrip().startswith(("[", "{")) else Path(text).read_text(encoding="utf-8-sig")
        value = json.loads(content)
    except OSError as error:
        raise ConfigError(f"{text!r} can't be read ({error.strerror}); name a JSON file", where=where) from error
    except ValueError as error:
        raise ConfigError(f"{text!r} is no JSON ({error}); write a list of objects", where=where) from error
    return parse_script(value, where=where)


def _problems(item: object) -> list[str]:
    if not isinstance(item, Mapping):
        return [f'got {item!r}; write an object such as {{"after_seconds": 5, "seconds": 30}}']
    found = [f"unknown key {key!r}; keys are {', '.join(_KEYS)}" for key in item if key not in _KEYS]
    if ("after_seconds" in item) == ("at_event" in item):
        found.append("say when: exactly one of after_seconds and at_event")
    kind = item.get("kind", "preemption")
    if kind not in KINDS:
        found.append(f"unknown kind {kind!r}; kinds are {', '.join(KINDS)}")
    if "seconds" not in item and kind != "rebalance":
        found.append('"seconds" is missing; say how long until the node goes')
    for key in ("seconds", "after_seconds"):
        if key in item and not _is_duration(item[key]):
            found.append(f"{key} {item[key]!r} must be a number from 0 up")
    for key in ("at_event", "reason"):
        if key in item and (not isinstance(item[key], str) or not item[key]):
            found.append(f"{key} {item[key]!r} must be a text that isn't empty")
    return found


def _is_duration(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf
