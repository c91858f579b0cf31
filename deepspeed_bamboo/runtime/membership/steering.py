"""When a change of placement that the engine has found is carried out: at once, later, or without moving stages.

The policy of ``bamboo.policy`` chooses (``core/steering.py``); here is what it knows: machines that were seen to come
and go, and what changes and losses have cost so far. Every worker keeps that, since any may be the next leader.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from deepspeed_bamboo.core.availability import Availability
from deepspeed_bamboo.core.placement import Placement, WorkerId
from deepspeed_bamboo.core.placing.sites import WorkerSite
from deepspeed_bamboo.core.reconfiguring import Target, is_safer, transfers
from deepspeed_bamboo.core.steering import (
    MOST_WAIT_SECONDS,
    POLICIES,
    Action,
    Foregone,
    Option,
    Outlook,
    Standing,
    options_at,
)
from deepspeed_bamboo.runtime.iteration.worker import Worker
from deepspeed_bamboo.runtime.job.news import tell
from deepspeed_bamboo.runtime.membership.balancing import Balancing
from deepspeed_bamboo.runtime.recovery.regroup import agreed_pause

Key = tuple[Any, ...]

_KEPT = 8  # of what changes and losses have cost
# Before anything was measured: what GPUs took.
_MOVE_SECONDS, _STAND_BY_SECONDS, _REGROUP_SECONDS = 1.0, 0.5, 1.0
_MOST_WAIT_ITERATIONS = 20


@dataclass(frozen=True)
class Found:
    """A change that the engine would carry out now. ``key``: what it depends on; the same key is the same change."""

    key: Key
    target: Target


class Steering:
    """One worker's view of it.

    Args:
        worker: whose job.
        balancing: knows how long iterations take.
        clock: seconds that only advance.
    """

    def __init__(self, worker: Worker, *, balancing: Balancing, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._worker = worker
        self._balancing = balancing
        self._policy = POLICIES[worker.session.config.policy]()
        self._availability = Availability(interval_seconds=worker.session.config.policy_interval_seconds)
        self._there: frozenset[WorkerId] | None = None
        self._waits: dict[WorkerId, tuple[float, int]] = {}  # since when, and since which step
        self._moves: deque[float] = deque(maxlen=_KEPT)
        self._stand_bys: deque[float] = deque(maxlen=_KEPT)
        self._pauses: deque[float] = deque(maxlen=_KEPT)
        self._left: set[WorkerId] = set()  # by plan, so that nothing is lost
        self._foregone = Foregone()
        self._put_off: Found | None = None
        self._told: tuple[Key, Action] | None = None

    # -- what is seen ------------------------------------------------------------------------------

    def look(self, present: Collection[WorkerId], *, waiting: Iterable[WorkerId]) -> None:
        """At each boundary, on every worker: who is there, and who of them waits to be taken in."""
        now, there = self._clock(), frozenset(present)
        before, self._there = self._there, there
        self._availability = self._availability.at(now)
        if before is not None and there != before:
            gone = before - there
            self._availability = self._availability.changed(now, gone=len(gone - self._left))
            self._left -= gone
        step = self._worker.step
        self._waits = {worker: self._waits.get(worker, (now, step)) for worker in waiting}

    def note(self, agreed: Mapping[WorkerId, Mapping[str, Any]]) -> None:
        """At the end of an iteration: what a loss in it has cost."""
        pause = agreed_pause(agreed, epoch=self._worker.epoch)
        if pause is not None:
            self._pauses.append(pause["total"])

    def moved(self, before: Placement, target: Target, *, seconds: float) -> None:
        """A change was carried out, and those who stay have waited for so long."""
        self._foregone = Foregone()
        self._left.update(target.leaving)
        if self._worker.me not in target.joining:
            (self._moves if transfers(before, target.placement) else self._stand_bys).append(seconds)

    # -- what is done ------------------------------------------------------------------------------

    def put_off(self, key: Key) -> Target | None:
        """The change that was put off, if nothing has changed since: it need not be looked for again."""
        return self._put_off.target if self._put_off is not None and self._put_off.key == key else None

    def chosen(self, found: Found, *, sites: Sequence[WorkerSite]) -> Target | None:
        """What of ``found`` is carried out now; None: nothing yet. ``sites``: of members and of those who join."""
        self._put_off = None
        options = self._options(found.target, sites)
        if not options:
            return found.target
        now = self._clock()
        outlook = Outlook(len(sites), self._loss_seconds(), self._availability, self._foregone.until(now))
        decision = self._policy.decide(options, outlook)
        self._foregone = self._foregone.after(decision, seconds=now)
        self._tell(found, decision.action, decision.reason)
        if decision.action is Action.WAIT:
            self._put_off = found
            return None
        if decision.action is Action.STAND_BY:
            names = ", ".join(found.target.joining)
            return replace(found.target, placement=self._worker.placement, reason=f"joined: {names}, to stand by")
        return found.target

    def _options(self, target: Target, sites: Sequence[WorkerSite]) -> Sequence[Option]:
        """What the policy may choose among; nothing where there is no choice."""
        placement = self._worker.placement
        if not self._policy.compares or target.leaving:
            return ()
        now, then = (self._balancing.seconds_of(one) for one in (placement, target.placement))
        if now is None or then is None:
            return ()
        whole = len(placement.all_shadows) >= len(target.placement.all_shadows)
        return options_at(
            Standing.of(placement, now),
            Standing.of(target.placement, then),
            stays_safe=whole and not is_safer(target.placement, placement, sites),
            waited_seconds=self._waited_seconds(target.joining),
            move_seconds=median(self._moves or [_MOVE_SECONDS]),
            stand_by_seconds=median(self._stand_bys or [_STAND_BY_SECONDS]),
        )

    def _waited_seconds(self, joining: Collection[WorkerId]) -> float | None:
        """Of who has waited longest. Many iterations count as long: a script may have to catch up with them."""
        waits = [self._waits[worker] for worker in joining if worker in self._waits]
        if not joining:
            return None
        now, step = self._clock(), self._worker.step
        if any(step - since >= _MOST_WAIT_ITERATIONS for _, since in waits):
            return MOST_WAIT_SECONDS
        return max((now - since for since, _ in waits), default=0.0)

    def _loss_seconds(self) -> float:
        lease = self._worker.session.config.coordinator.lease_seconds
        return median(self._pauses or [lease + _REGROUP_SECONDS])

    def _tell(self, found: Found, action: Action, reason: str) -> None:
        """In the log and to the person who watches, once for each change and decision."""
        if not reason or self._told == (found.key, action):
            return
        self._told = (found.key, action)
        worker, joining = self._worker, list(found.target.joining)
        fields = {"policy": self._policy.name, "action": action.value, "reason": reason, "joining": joining}
        worker.log_event("decision", **fields)
        tell(worker, f"step {worker.step}: {self._policy.name}: {reason}")

    # -- for those who join ------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """What a worker that joins has to know, since it may be the next one that decides."""
        return {
            "availability": self._availability.to_json(),
            "moves": list(self._moves),
            "stand_bys": list(self._stand_bys),
            "pauses": list(self._pauses),
        }

    def take(self, value: Mapping[str, Any]) -> None:
        """Inverse of :meth:`to_json`."""
        self._availability = Availability.from_json(
            value["availability"], interval_seconds=self._availability.interval_seconds
        )
        for mine, theirs in (
            (self._moves, value["moves"]),
            (self._stand_bys, value["stand_bys"]),
            (self._pauses, value["pauses"]),
        ):
            mine.extend(float(seconds) for seconds in theirs)
