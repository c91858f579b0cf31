"""Gives a learning-rate scheduler its state, also one that adds what it loads to what it has.

``load_state_dict`` of Megatron's scheduler takes a step of as many samples as the state has. DeepSpeed loads once, and
onto a scheduler that has counted nothing, so that is right there. The plugin loads onto one that has trained, too: with
what a shadow gets from its owner, after a loss, and where a job goes back to an earlier step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def set_scheduler_state(scheduler: Any, state: Mapping[str, Any]) -> None:
    """Make the state of ``scheduler`` what ``state_dict`` of one like it returned.

    What numbers then have too much they had before, so they are loaded again without that.
    """
    before = {name: value for name, value in getattr(scheduler, "__dict__", {}).items() if _is_number(value)}
    scheduler.load_state_dict(state)
    now = scheduler.state_dict()
    if not isinstance(state, Mapping) or not isinstance(now, Mapping):
        return
    names = [name for name in before if _is_number(state.get(name)) and _is_number(now.get(name))]
    added = {name: now[name] - state[name] for name in names if now[name] != state[name]}
    if not added:
        return
    for name, more in added.items():
        setattr(scheduler, name, before[name] - more)
    scheduler.load_state_dict(state)


class SetScheduler:
    """In the place of ``scheduler`` while stock loads: what it loads is set."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See :func:`set_scheduler_state`."""
        set_scheduler_state(self._scheduler, state)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
