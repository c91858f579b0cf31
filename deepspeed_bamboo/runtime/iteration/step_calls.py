"""The steps of one iteration, each suspended where it needs the others, until all have agreed that all take it."""

from __future__ import annotations

import functools
from collections.abc import Container, Mapping, Set
from typing import Any

import torch

from deepspeed_bamboo.core.grid import Coordinate
from deepspeed_bamboo.core.placement import WorkerId
from deepspeed_bamboo.runtime.iteration.worker import Worker
from deepspeed_bamboo.runtime.stock.collectives import CallSet, Contribution, answers_from
from deepspeed_bamboo.runtime.stock.partition_gather import gather
from deepspeed_bamboo.runtime.stock.replica import StageReplica
from deepspeed_bamboo.runtime.stock.running_calls import RunningCalls
from deepspeed_bamboo.runtime.stock.shadow_steps import LateStep, ShadowSteps
from deepspeed_bamboo.runtime.stock.stock_steps import StockSteps


class StepCalls:
    """One worker's steps, of all that it hosts and shadows.

    Args:
        worker: whose they are.
        stock: what takes a step.
        running: knows which of them runs.
        shadow_steps: the stream beside which shadows take theirs.
    """

    def __init__(self, worker: Worker, *, stock: StockSteps, running: RunningCalls, shadow_steps: ShadowSteps) -> None:
        self._worker = worker
        self._stock = stock
        self._running = running
        self._shadow_steps = shadow_steps
        self._calls: CallSet | None = None
        # What the calls have gathered and not been told yet.
        self._gathered: dict[Coordinate, torch.Tensor] = {}

    # -- before the agreement ----------------------------------------------------------------------

    def start(self, coordinates: Container[Coordinate]) -> CallSet:
        """Begin the steps of ``coordinates``: each stops at its first collective, or before it changes a weight."""
        with self._running.during(self._begun()) as calls:
            calls.start(coordinates)
        return calls

    def start_in_time(self, shadows: Set[Coordinate]) -> None:
        """Begin the steps of ``shadows``, except those that begin after the agreement."""
        self.start(shadows - self._may_be_late(self._begun()))

    def contributions(self) -> dict[Coordinate, Any]:
        """What the steps of this worker's stages need all others to know, by coordinate; begins them."""
        return self._contributions(self.start(self._worker.host.owned))

    def cancel(self) -> None:
        """As if no step had begun."""
        self._gathered = {}
        if self._calls is None:
            return
        calls, self._calls = self._calls, None
        with self._running.during(calls):
            calls.cancel()

    def _begun(self) -> CallSet:
        """The steps of this iteration, of which none may have begun."""
        host = self._worker.host
        if self._calls is None:
            self._calls = CallSet(host, host.replicas(), self._take, device=self._worker.device)
            if self._shadow_steps.active:
                self._calls.beside = dict.fromkeys(host.shadows, self._shadow_steps)
        return self._calls

    def _may_be_late(self, calls: CallSet) -> set[Coordinate]:
        """The shadows on a worker that begins every iteration. Others wait then anyway, and the device with them."""
        host = self._worker.host
        if not any(coordinate.stage == 0 for coordinate in host.owned):
            return set()
        return {c for c, shadow in host.shadows.items() if c in calls.beside and self._shadow_steps.can_wait(shadow)}

    def _contributions(self, calls: CallSet) -> dict[Coordinate, Any]:
        self._lead_on(calls)
        owned = self._worker.host.owned
        return {c: Contribution.of(request).to_plain() for c, request in calls.pending().items() if c in owned}

    def _lead_on(self, calls: CallSet) -> None:
        """Make the main stream wait for the step of an owner that was a shadow until a moment ago."""
        for coordinate in self._worker.host.owned.keys() & calls.beside.keys():
            calls.beside[coordinate].lead()

    # -- after it ----------------------------------------------------------------------------------

    def forget_others(self) -> None:
        """Drop the steps of replicas that are none: they were rebuilt in an epoch that ended before all counted them.

        Raises RuntimeError where no step has begun.
        """
        host = self._worker.host
        with self._running.during(self._agreed_upon()) as calls:
            calls.keep({**host.owned, **host.shadows})

    def take(self, *, micro_batches: int) -> None:
        """Take them all, an agreement for each collective. Continues where an interruption stopped it."""
        worker, activity, calls = self._worker, self._worker.activity, self._agreed_upon()
        late = self._may_be_late(calls)
        if activity.delivered == 0:
            # One that was to be late may belong to an owner by now.
            self.start({replica.coordinate for replica in worker.host.replicas()}.difference(late))
        while pending := {c: request for c, request in calls.pending().items() if c not in late}:
            if activity.delivered == len(activity.rounds):
                self._agree(calls, pending)
            agreed = _contributed(activity.rounds[activity.delivered])
            activity.delivered += 1
            told = {c: request for c, request in pending.items() if c not in self._gathered}
            answers = {**answers_from(told, agreed, device=worker.device), **self._gathered}
            self._gathered = {}
            with self._running.during(calls):
                calls.advance(answers, later=late)
        for replica in worker.host.replicas():
            if replica.coordinate in late:
                launch = functools.partial(self._take_late, calls, replica, _contributed(activity.rounds[0]))
                replica.stepping = LateStep(replica, launch)
            elif replica.coordinate in calls.beside:
                self._shadow_steps.finish(replica)
            replica.micro_offset += micro_batches
        self._calls = None

    def launch_late(self) -> None:
        """Launch the steps that :meth:`take` has left for later, once the next iteration's first result is out."""
        for replica in self._worker.host.shadows.values():
            if isinstance(replica.stepping, LateStep):
                replica.stepping.launch()

    def _agreed_upon(self) -> CallSet:
        if self._calls is None:
            raise RuntimeError("a step without an agreement")
        return self._calls

    def _agree(self, calls: CallSet, pending: Mapping[Coordinate, Any]) -> None:
        worker, activity = self._worker, self._worker.activity
        self._lead_on(calls)
        self._gathered = gather(
            pending,
            links=worker.links,
            placement=worker.placement,
            me=worker.me,
            label=f"{activity.index}/{activity.delivered}",
        )
        for coordinate in [c for c in self._gathered if c in worker.host.owned]:
            worker.strike_if_scripted(coordinate, "gather")
        value = {"contributions": self._contributions(calls)}
        activity.rounds.append(worker.agree(value, among=worker.placement.holders))

    def _take_late(
        self, calls: CallSet, replica: StageReplica, contributions: Mapping[Coordinate, Contribution]
    ) -> None:
        host, coordinate = self._worker.host, replica.coordinate
        active = host.active
        with self._running.during(calls):
            calls.start({coordinate})
            pending = {coordinate: calls.pending()[coordinate]}
            answer = answers_from(pending, contributions, device=self._worker.device)[coordinate]
            self._shadow_steps.follow(answer)
            calls.finish(coordinate, answer)
        self._shadow_steps.finish(replica)
        if active is not None:
            host.activate(active)

    def _take(self) -> None:
        """Stock's step of the active replica."""
        if self._worker.grid.stages == 1:
            # Nothing of such a step needs others before the agreement, so it would be through (fp16: the scale has
            # moved, an overflow is skipped and counted) before it is agreed upon.
            self._running.pass_gate()
        active = self._worker.host.active
        if active is not None and active.coordinate in self._worker.host.shadows:
            with self._shadow_steps.beside(active):
                self._stock.take_quiet_step()
        else:
            self._stock.take_step(active)


def _contributed(agreed: Mapping[WorkerId, Any]) -> dict[Coordinate, Contribution]:
    """What all coordinates have contributed, from everybody's value in an agreement."""
    return {c: Contribution.from_plain(part) for value in agreed.values() for c, part in value["contributions"].items()}
