"""Gives a learning-rate scheduler its state, also one that adds what it loads to what it has.

``load_state_dict`` of Megatron's scheduler takes a step of as many samples as the state has. DeepSpeed loads once, and
onto a scheduler that has counted nothing, so that is right there. The plugin loads onto one that has trained, too: with
what a shadow gets from its owner, after a loss, and where a job goes back to an earlier step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def set_scheduler_state(scheduler: Any, state: Mapping[str, Any]) -> None:
    """Make the state of ``scheduler`` what one like it has that counted nothing and loads ``state``.

    A number to which a load adds is 0 before it. All others are before it what they are now: a scheduler may keep a
    value of its own, where the state has another one.
    """
    before = _numbers(scheduler)
    scheduler.load_state_dict(state)
    now = scheduler.state_dict()
    if not isinstance(state, Mapping) or not isinstance(now, Mapping):
        return
    known = [n for n, value in before.items() if value and _is_number(state.get(n)) and _is_number(now.get(n))]
    grown = [name for name in known if now[name] == state[name] + before[name]]
    if not grown:
        return
    added = {name for name in grown if state[name] or _adds(scheduler, state, name)}
    _put(scheduler, {name: 0 if name in added else value for name, value in before.items()})
    scheduler.load_state_dict(state)


def _adds(scheduler: Any, state: Mapping[str, Any], name: str) -> bool:
    """Whether a load adds to this number: ``state`` has 0 of it, so one load does not tell. Loads another state."""
    before = getattr(scheduler, name)
    scheduler.load_state_dict({**state, name: 1})
    return bool(scheduler.state_dict()[name] == before + 1)


class NumbersBefore:
    """What schedulers had before the script's load, which is done again after a loss."""

    def __init__(self) -> None:
        self._known: list[tuple[Any, dict[str, Any]]] = []

    def again(self, scheduler: Any) -> None:
        """Before a load of ``scheduler``: let it have what it had before the first one."""
        known = next((numbers for its, numbers in self._known if its is scheduler), None)
        if known is None:
            self._known.append((scheduler, _numbers(scheduler)))
        else:
            _put(scheduler, known)


class SetScheduler:
    """In the place of ``scheduler`` while stock loads: what it loads is set."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See :func:`set_scheduler_state`."""
        set_scheduler_state(self._scheduler, state)


def _numbers(scheduler: Any) -> dict[str, Any]:
    return {name: value for name, value in getattr(scheduler, "__dict__", {}).items() if _is_number(value)}


def _put(scheduler: Any, numbers: Mapping[str, Any]) -> None:
    for name, value in numbers.items():
        setattr(scheduler, name, value)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
