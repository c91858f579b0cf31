"""What a script changes in the scheduler that each stage has: its rates, its count of steps, what it has seen.

A script has the scheduler of one stage, a worker one for each stage that it hosts, and for each shadow. The scripts of
all workers do the same, so what one changes goes to all of its own worker's that had the same value before.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from deepspeed_bamboo.runtime.stock.replica import StageReplica
from deepspeed_bamboo.runtime.stock.scheduler_parts import Way, is_saved, parts_of
from deepspeed_bamboo.runtime.stock.written import SetOnSchedule

_ATOMS = (bool, int, float, str, type(None))
_Values = Mapping[tuple[Way, str], Any]
"""By part of a scheduler, and attribute of that."""


class ScheduleByHand:
    """For one worker; see the module."""

    def __init__(self) -> None:
        self._scheduler: Any = None
        self._left: _Values = {}

    def leave(self, shown: StageReplica | None) -> None:
        """After a step: what the scheduler of ``shown``, which the script has, holds."""
        scheduler = own_scheduler(shown)
        self._scheduler, self._left = scheduler, _plain_values(scheduler)

    def follow(self, shown: StageReplica | None, replicas: Iterable[StageReplica]) -> tuple[SetOnSchedule, ...]:
        """Before a step: carry what the script has changed since. Returns it."""
        scheduler = own_scheduler(shown)
        if scheduler is None or scheduler is not self._scheduler:
            self.leave(shown)
            return ()
        now, left = _plain_values(scheduler), self._left
        changes = tuple(
            SetOnSchedule(name, left[way, name], value, way)
            for (way, name), value in now.items()
            if (way, name) in left and not _same(left[way, name], value)
        )
        if changes:
            self.write_again(replicas, changes)
            self._left = now
        return changes

    def come_back(self, shown: StageReplica | None, replicas: Iterable[StageReplica]) -> None:
        """The script has come to the job's step, since :meth:`leave` when the job's state was here already.

        What it changed on its way is in that state, as far as a scheduler's state has it; the rest goes to all stages.
        """
        scheduler = own_scheduler(shown)
        if scheduler is None or scheduler is not self._scheduler:
            return
        saved, parts, replicas = scheduler.state_dict(), parts_of(scheduler), list(replicas)
        for (way, name), value in _plain_values(scheduler).items():
            before = self._left.get((way, name), value)
            if _same(before, value):
                continue
            if is_saved(saved, way, name):
                parts[way][name] = copy.deepcopy(before)
            else:
                _set(replicas, SetOnSchedule(name, before, value, way))
        self.leave(shown)

    def write_again(self, replicas: Iterable[StageReplica], changes: Sequence[SetOnSchedule]) -> None:
        """What :meth:`follow` has returned, before a step that is done again."""
        for change in changes:
            _set(replicas, change)

    def restored(self, replicas: Iterable[StageReplica], changes: Sequence[SetOnSchedule]) -> None:
        """The stages have a state of before ``changes``, apart from what is not in a scheduler's state."""
        for change in reversed(changes):
            _set(replicas, replace(change, before=change.now, now=change.before))


def _set(replicas: Iterable[StageReplica], change: SetOnSchedule) -> None:
    for replica in replicas:
        replica.finish_step()
        held = parts_of(own_scheduler(replica)).get(change.way, {})
        if change.name in held and _same(held[change.name], change.before):
            held[change.name] = copy.deepcopy(change.now)


def own_scheduler(replica: StageReplica | None) -> Any:
    """The scheduler that ``replica`` has as each stage has one."""
    if replica is None or replica.built_scheduler is None:
        return None
    scheduler = replica.attributes["lr_scheduler"]
    return scheduler if scheduler is not None and vars(scheduler) is vars(replica.built_scheduler) else None


def _plain_values(scheduler: Any) -> _Values:
    return {
        (way, name): copy.deepcopy(value)
        for way, held in parts_of(scheduler).items()
        for name, value in held.items()
        if _is_plain(value)
    }


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, value)) and all(map(_is_plain, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return isinstance(value, _ATOMS)


def _same(one: Any, other: Any) -> bool:
    return one.__class__ is other.__class__ and bool(one == other)
