"""This project's policy as the engine carries it out: core's placements and plans on however many workers there are.

A loss interrupts the iteration: after detection and new connections the takers-over do the lost part again, the others
continue, and the iteration ends later (core/interrupted.py). At its end stages move to where core's balance wants them.
Lost shadows are copied meanwhile. Joining and draining workers are dealt with at the end of an iteration, too.
A loss is fatal if nobody has a stage any more: neither its owner, nor a worker with a shadow of it, nor, where
pipelines are alike (not in bf16 and not with ZeRO), another pipeline. Then all go back to a checkpoint: in their
processes where somebody is left for each stage's copy in memory, or to the store. What all of it costs is in LiveSpec.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import ClassVar

from ...core.placement import Placement, WorkerId
from ...core.placing.sites import Sites, WorkerSite
from ...core.reconfiguring import LEAST_GAIN, is_safer, transfers
from ...core.restoring import Site, keepers
from ...core.steering import Action, Policy, Proactive, Standing, options_at
from ..clock import MILLISECONDS_PER_SECOND, NEVER, to_milliseconds
from ..ledger import Ledger, Mode
from ..planned import PlannedGrid
from ..progress import Progress
from ..scenario import LiveSpec
from .alarms import AlarmedPolicy, Ring, Status
from .steered import Steered

__all__ = ["IterationCosts", "PlannedPolicy"]


class IterationCosts:
    """What an iteration takes besides its passes.

    Args:
        fixed_seconds: of every one.
        reduce_seconds: of reducing and updating one coordinate's gradients on its worker.
        overhead: what redundancy adds, as a fraction of the iteration.
    """

    def __init__(self, *, fixed_seconds: float, reduce_seconds: float, overhead: float) -> None:
        self._fixed, self._reduce, self.overhead = fixed_seconds, reduce_seconds, overhead

    def seconds(self, passes_seconds: float, *, most_hosted: int) -> float:
        """Of an iteration whose passes take so long."""
        return (passes_seconds + self._fixed + self.reducing_seconds(most_hosted)) * (1.0 + self.overhead)

    def reducing_seconds(self, most_hosted: int) -> float:
        """Of one iteration, on the worker that hosts most."""
        return self._reduce * most_hosted


class PlannedPolicy(AlarmedPolicy):
    """See the module.

    Attributes:
        record: filled, if it is a list: "pause" and seconds of every loss, "join", "move" and "transfer" of every
            reconfiguration with and without a newcomer.
    """

    name: ClassVar[str] = "deepspeed-bamboo"

    def __init__(
        self,
        progress: Progress,
        ledger: Ledger,
        *,
        spec: LiveSpec,
        planned: PlannedGrid,
        costs: IterationCosts,
        coordinate_bytes: float,
        steering: Policy | None = None,
    ) -> None:
        """A coordinate's state has `coordinate_bytes`. `steering` decides when to move and when to wait."""
        super().__init__(progress, ledger, spec=spec)
        self._planned, self._costs = planned, costs
        self.redundancy_share = costs.overhead / (1.0 + costs.overhead)
        by_link = coordinate_bytes / spec.link_bytes_per_second
        self._copy_seconds = by_link if spec.coordinate_copy_seconds is None else spec.coordinate_copy_seconds
        held = coordinate_bytes * (1.0 + (planned.copies if planned.protected else 0))
        most = max(1, int(spec.state_memory_bytes / max(1e-9, held)))
        self._least_workers = math.ceil(len(planned.grid) / most)
        # Members of the job in their order; those who wait to be taken in; those who are to leave.
        self._members: dict[WorkerId, None] = {}
        self._waiting: dict[WorkerId, int] = {}  # since when
        self._draining: dict[WorkerId, None] = {}
        self._placement: Placement | None = None
        self._seconds: float | None = None  # of an iteration's passes with it, once it is known
        self._lost: dict[WorkerId, str] = {}  # with the zone that each was in
        self._look = False
        # Of the iteration in flight, or of what is left of an interrupted one.
        self._iteration_seconds = 0.0
        self._rest_seconds: float | None = None
        # Of an iteration of now: reducing, uneven loads, bubbles. And the steps that are accounted for.
        self._longer_seconds = (0.0, 0.0, 0.0)
        self._accounted_steps = 0
        self.record: list[tuple[str, float]] | None = None
        self._steering = Steered(
            steering,
            interval_seconds=spec.policy_interval_seconds,
            loss_seconds=spec.detect_seconds + spec.regroup_seconds,
        )
        self._put_off, self._look_at = False, NEVER

    # -- machines ----------------------------------------------------------------------------------

    def noticed(self, now: int, node: str) -> None:
        """See Policy: it is emptied at the next boundary."""
        self._waiting.pop(node, None)
        if node in self._members:
            self._saw(now)
            self._draining[node] = None
            self.wants_step_end = self._status is Status.RUNNING

    def removed(self, now: int, node: str) -> None:
        """See Policy: all losses of one instant are dealt with together, in `settle`."""
        zone = self._zones.pop(node, None)
        if self._waiting.pop(node, None) is not None and node not in self._members:
            self._saw(now, gone=1)
        if node in self._members:
            self._lost[node] = zone or ""

    def _is_member(self, node: str) -> bool:
        return node in self._members

    @property
    def _admits(self) -> bool:
        """As the engine: without shadows (mode off) nobody is taken in while a job runs, nor do stages move for speed.

        Somebody then ends the job at a boundary and starts it again, where that is worth it.
        """
        return self._planned.protected

    def _copied(self) -> None:
        self._protect()
        self.wants_step_end = self._status is Status.RUNNING

    def _saw(self, now: int, *, gone: int = 0) -> None:
        self._steering.saw(now, gone=gone)
        self._put_off = False

    def _put_off_for(self, now: int, *, seconds: float) -> None:
        """What is not done now is looked at again then, or when somebody comes or goes."""
        self._put_off, self._look_at = True, now + max(1, to_milliseconds(seconds))
        self._ring(self._look_at, Ring.LOOK)

    def _look_again(self, now: int) -> None:
        if now == self._look_at:
            self._look, self._put_off = True, False
            self.wants_step_end = self._status is Status.RUNNING

    def _register(self, now: int, node: str) -> None:
        self._saw(now)
        self._waiting[node] = now
        self.wants_step_end = self._status is Status.RUNNING
        if self._status is Status.WAITING and len(self._members) + len(self._waiting) >= self._least_workers:
            self._pause(now, self._spec.handover_seconds if self._placement is not None else self._spec.start_seconds)

    def _note(self, what: str, seconds: float) -> None:
        if self.record is not None:
            self.record.append((what, seconds))

    def _sites(self, workers: Iterable[WorkerId]) -> list[WorkerSite]:
        return [WorkerSite(worker, worker, self._zones.get(worker, "")) for worker in workers]

    # -- losses ------------------------------------------------------------------------------------

    def settle(self, now: int) -> None:
        """See Policy: coordinates of lost workers are taken over."""
        zones, self._lost = self._lost, {}
        lost = [worker for worker in zones if worker in self._members]
        if not lost:
            return
        self._saw(now, gone=len(lost))
        before, taking_part = self._placement, len(self._members)
        sites = {worker: Site(worker, zones.get(worker, self._zones.get(worker, ""))) for worker in self._members}
        for worker in lost:
            del self._members[worker]
            self._draining.pop(worker, None)
        if before is None:
            return
        after, _ = before.without(lost)
        if after is None:
            self._lose_all(now, in_memory=self._memory_survives(before, set(lost), sites))
            return
        hosting = [worker for worker in lost if before.hosted_by(worker)]
        copied = self._copied_elsewhere(before, after, lost)
        if self._status is Status.RUNNING and hosting:
            self._interrupt(now, taking_part, len(hosting))
        self._placement, self._seconds = after, None
        self._look = True
        self._rebuild_shadows(now)
        if not hosting and self._status is Status.RUNNING:
            self.wants_step_end = True  # A standby is missed by nobody; where it had shadows they are rebuilt.
            return
        self.ledger.failovers += 1
        if self._status is not Status.WAITING:
            pause = self._spec.detect_seconds + self._spec.regroup_seconds + self._received(copied)
            self._note("pause", pause)
            self._pause(now, pause)

    def _interrupt(self, now: int, taking_part: int, lost: int) -> None:
        """The iteration in flight continues after the pause, and repeats its lost part."""
        elapsed = self.progress.suspend(now) / MILLISECONDS_PER_SECOND
        done = min(1.0, elapsed / self._iteration_seconds) if self._iteration_seconds else 0.0
        passes = self._planned.loss_seconds(taking_part, lost=lost, done=done)
        rest = self._costs.seconds(passes, most_hosted=_most_hosted(self._placement))
        again = max(0.0, elapsed + rest - self._iteration_seconds)
        self.progress.wasted_milliseconds += round(again * MILLISECONDS_PER_SECOND)
        self._rest_seconds = rest

    def _copied_elsewhere(self, before: Placement, after: Placement, lost: list[WorkerId]) -> list[WorkerId]:
        """The receivers of coordinates that were lost with their shadows, and come from another pipeline."""
        gone, copies, owners = set(lost), before.all_copies(), dict(after.owners)
        return [
            owners[coordinate]
            for coordinate, worker in before.owners
            if worker in gone and owners[coordinate] not in copies[coordinate]
        ]

    def _received(self, receivers: Iterable[WorkerId]) -> float:
        """Seconds until the worker that receives the state of most coordinates has it all."""
        count: dict[WorkerId, int] = {}
        for worker in receivers:
            count[worker] = count.get(worker, 0) + 1
        return self._spec.transfer_seconds + max(count.values()) * self._copy_seconds if count else 0.0

    def _lose_all(self, now: int, *, in_memory: bool) -> None:
        """``in_memory``: somebody is left for each coordinate whose memory has a copy of it."""
        self.ledger.fatal_losses += 1
        spec = self._spec
        goes_back = spec.fatal == "in-place" and self._planned.protected
        in_memory = goes_back and in_memory
        self.progress.roll_back(now, in_memory=in_memory)
        self._account()  # What is lost is wasted, whatever it was.
        self._placement, self._rest_seconds, self._look = None, None, False
        if in_memory:
            self.ledger.back_to_memory += 1
            self._pause(now, spec.detect_seconds + spec.regroup_seconds + spec.in_place_seconds)
        elif goes_back and self._members:
            self.ledger.back_to_store += 1
            self._pause(now, spec.detect_seconds + spec.regroup_seconds + spec.restore_seconds)
        else:
            self._pause(now, spec.restart_seconds + spec.restore_seconds)

    def _memory_survives(self, before: Placement, lost: set[WorkerId], sites: Mapping[WorkerId, Site]) -> bool:
        """Whether a worker is left for every coordinate that has its checkpoint: owner, shadow, or a keeper of it."""
        kept = keepers(before, sites, copies=self._spec.memory_copies)
        return all(not lost.issuperset((*holders, *kept[c])) for c, holders in before.all_copies().items())

    def _rebuild_shadows(self, now: int) -> None:
        """Missing shadows are copied while training continues."""
        if self._placement is None or not self._planned.protected or len(self._members) < 2:
            return
        has = self._placement.all_copies()
        missing = [
            worker
            for c, holders in self._protected(self._placement).all_copies().items()
            if len(holders) > len(has[c])
            for worker in holders
            if worker not in has[c]
        ]
        self._copy_until(max(now, self._copying_until) + to_milliseconds(self._received(missing)))

    def _protected(self, placement: Placement) -> Placement:
        held = {c: holders[1:] for c, holders in placement.all_copies().items()}
        return self._planned.with_shadows(placement, Sites.of(self._sites(self._members)), held)

    def _protect(self) -> None:
        if self._placement is not None and self._members:
            self._placement = self._protected(self._placement)

    # -- iterations --------------------------------------------------------------------------------

    def _resume(self, now: int) -> None:
        """A pause is over: train, if there are workers enough."""
        if self._placement is None or len(self._members) < self._least_workers:
            self._members.update(dict.fromkeys(self._waiting))
            self._waiting.clear()
            if len(self._members) < self._least_workers:
                self._status = Status.WAITING
                self.ledger.enter(now, Mode.IDLE)
                return
            self._draining.clear()
            self._arrange(list(self._members))
        self._status = Status.RUNNING
        self.ledger.enter(now, Mode.RUNNING)
        self._start(now)

    def _account(self) -> None:
        """Book what the steps since the last time took longer than all work shared evenly."""
        steps, ledger = self.progress.steps - self._accounted_steps, self.ledger
        reducing, uneven, bubbles = self._longer_seconds
        ledger.reducing_milliseconds += steps * reducing * MILLISECONDS_PER_SECOND
        ledger.uneven_milliseconds += steps * uneven * MILLISECONDS_PER_SECOND
        ledger.bubble_milliseconds += steps * bubbles * MILLISECONDS_PER_SECOND
        self._accounted_steps = self.progress.steps

    def ended(self, now: int) -> None:
        """See Policy."""
        self._account()

    def _start(self, now: int) -> None:
        self._account()
        if self._rest_seconds is not None:
            seconds, self._rest_seconds = self._rest_seconds, None
            self.wants_step_end = True
        else:
            seconds = self._costs.seconds(self._passes_seconds(), most_hosted=_most_hosted(self._placement))
            self._longer_seconds = self._longer()
            self.wants_step_end = bool((self._waiting and not self._put_off) or self._draining or self._look)
        if now < self._copying_until:
            seconds *= self._spec.copying_slowdown
            self.wants_step_end = True
        self._iteration_seconds = seconds
        self.progress.start(now, max(1, math.ceil(seconds * MILLISECONDS_PER_SECOND)))

    def _passes_seconds(self) -> float:
        if self._placement is None:
            raise RuntimeError("nothing is placed yet")
        if self._seconds is None:
            self._seconds = self._planned.seconds_of(self._placement)
        return self._seconds

    def _longer(self) -> tuple[float, float, float]:
        """By how much reducing, uneven loads and bubbles make an iteration longer."""
        if self._placement is None:
            raise RuntimeError("nothing is placed yet")
        busiest = self._planned.least_seconds_of(self._placement)
        uneven = busiest - self._planned.work_seconds / len(self._members)
        return self._costs.reducing_seconds(_most_hosted(self._placement)), uneven, self._passes_seconds() - busiest

    def _arrange(self, workers: list[WorkerId]) -> None:
        """Make a new placement, with few moves."""
        self._placement = self._planned.arranged(self._sites(workers), self._placement)
        self._seconds = self._planned.shape(len(workers)).seconds

    def step_ended(self, now: int) -> None:
        """See Policy: the boundary at which workers come and go, and stages move."""
        self.wants_step_end = False
        before, workers = self._placement, self._next_members()
        self._look = False
        self.progress.hold()
        if before is not None and not self._admits and self._starts_again(now, before):
            return
        if workers is None or before is None:
            self._start(now)
            return
        action = self._decide(now, before, workers)
        if action is Action.WAIT:
            self._start(now)
            return
        if action is Action.MOVE:
            self._arrange(workers)
        joined = bool(self._waiting) and self._admits
        self._members = dict.fromkeys(workers)
        if joined:
            self._waiting.clear()
        self._draining.clear()
        self.ledger.reconfigurations += 1
        moving = self._moving_seconds(before, self._placement or before, joined=joined)
        standstill = self._handover_seconds(joined=joined) + moving
        self._note("join" if joined else "move", standstill)
        self._note("transfer", moving)
        # State and shadows are where they belong when the pause is over.
        self._copying_until = now
        self._pause(now, standstill)

    def _starts_again(self, now: int, before: Placement) -> bool:
        """Whether the job is started again with all who are there, from a checkpoint of this moment."""
        workers = len({*self._members, *self._waiting} - set(self._draining))
        self._put_off_for(now, seconds=self._spec.policy_interval_seconds)
        now_takes, then = self._passes_seconds(), self._planned.shape(workers).seconds
        if workers == 0 or then >= now_takes * (1.0 - LEAST_GAIN):
            return False
        cost = self._spec.restart_seconds + self._spec.restore_seconds
        options = options_at(
            Standing.of(before, now_takes),
            Standing(min(workers, len(before.grid)), then),
            stays_safe=True,
            move_seconds=cost,
            stand_by_seconds=cost,
        )
        outlook = self._steering.outlook(now, workers=workers)
        if Proactive().decide(options, outlook).action is not Action.MOVE:
            return False
        self.ledger.reconfigurations += 1
        self.progress.save()
        self._account()
        self._placement = None
        self._pause(now, cost)
        return True

    def _decide(self, now: int, before: Placement, workers: list[WorkerId]) -> Action:
        """What of all that can be done is done."""
        if self._draining or not self._steering.compares:
            return Action.MOVE
        sites = self._sites(workers)
        after = self._planned.arranged(sites, before)
        usual = self._costs.seconds(self._passes_seconds(), most_hosted=_most_hosted(before))
        then = self._costs.seconds(self._planned.shape(len(workers)).seconds, most_hosted=_most_hosted(after))
        since = min(self._waiting.values(), default=None)
        enough = len(self._members) > (self._planned.copies if self._planned.protected else 0)
        options = options_at(
            Standing.of(before, usual),
            Standing.of(after, then),
            stays_safe=enough and not is_safer(after, self._protected(before), sites),
            waited_seconds=None if since is None else (now - since) / MILLISECONDS_PER_SECOND,
            move_seconds=self._handover_seconds(joined=since is not None)
            + self._moving_seconds(before, after, joined=since is not None),
            stand_by_seconds=self._handover_seconds(joined=True) + self._spec.join_transfer_seconds,
        )
        action, seconds = self._steering.decide(now, options, workers=len(workers))
        if action is not Action.MOVE:
            self._put_off_for(now, seconds=seconds)
        return action

    def _handover_seconds(self, *, joined: bool) -> float:
        return self._spec.handover_seconds + (self._spec.join_handover_seconds if joined else 0.0)

    def _moving_seconds(self, before: Placement, after: Placement, *, joined: bool) -> float:
        moving = self._received(move.destination for move in transfers(before, after))
        return moving + (self._spec.join_transfer_seconds if joined else 0.0)

    def _next_members(self) -> list[WorkerId] | None:
        """Who takes part from now on, if stages are to move; None if nothing changes."""
        waiting = self._waiting if self._admits else {}
        staying = [worker for worker in (*self._members, *waiting) if worker not in self._draining]
        if not staying:
            self._draining.clear()
            return None
        if waiting or self._draining:
            return staying
        if not self._look or self._placement is None or not self._admits:
            return None
        best = self._planned.shape(len(staying)).seconds
        if self._planned.least_seconds_of(self._placement) * (1.0 - LEAST_GAIN) < best:
            now = self._passes_seconds()
            return staying if now - best >= LEAST_GAIN * now else None
        return staying


def _most_hosted(placement: Placement | None) -> int:
    """Of one worker."""
    return max(Counter(worker for _, worker in placement.owners).values()) if placement is not None else 0
