"""After a loss that takes the last live copy of a stage: survivors bring a state of before back, in place (arch. 10).

Each has reported what it keeps in host memory, so all choose the same state (``core/restoring.py``), or agree on a
newer one in the store. Whoever owns or shadows a stage from now on gets its part (``sources.py``), and all agree that
they have it. The next epoch says that
this is done; until it is there, a further loss makes them begin again with what is left. Then the steps since that
state are done again. The script hears nothing of it: it is in a call, which goes on where it was.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from deepspeed_bamboo.coordination import EpochRecord, fatal_loss
from deepspeed_bamboo.core.consensus import Conclusion
from deepspeed_bamboo.core.placement import Placement, WorkerId
from deepspeed_bamboo.core.restoring import Kept, newest_state, stored_steps
from deepspeed_bamboo.core.roles import proposer
from deepspeed_bamboo.runtime.iteration.activity import ActivityState, Round
from deepspeed_bamboo.runtime.iteration.micro_batches import PipelineData
from deepspeed_bamboo.runtime.iteration.step_history import StepHistory
from deepspeed_bamboo.runtime.iteration.worker import Worker
from deepspeed_bamboo.runtime.job.giving_up import give_up
from deepspeed_bamboo.runtime.job.news import tell_once
from deepspeed_bamboo.runtime.recovery.memory_rounds import MemoryRounds
from deepspeed_bamboo.runtime.recovery.sources import (
    MEMORY,
    STORE,
    Damaged,
    FromMemory,
    FromStore,
    Stages,
    Store,
    Together,
)
from deepspeed_bamboo.runtime.recovery.state_transfer import StateTransfer
from deepspeed_bamboo.runtime.recovery.world_entry import WorldEntry
from deepspeed_bamboo.runtime.stock.script_writes import ScriptWrites

_PROTECT = "protect"  # the activity in which lost shadows are copied
_MEET = "way back"  # the one at the end of a way back


@dataclass(frozen=True)
class WayBack:
    """What it takes to do steps again.

    ``history`` is what was before each, ``data`` returns where micro-batches come from. ``writes`` carries what the
    script writes. ``redo`` does the next iteration. ``count_to`` has a worker that stands by be at a step,
    ``look_alike`` is called when owners and shadows are. ``changed_by_hand`` returns the first step whose state has
    what the script has changed by hand, and nobody could do again; 0 where that is nothing. ``store`` returns the
    checkpoints of ``checkpoint.dir``, None where none are.
    """

    history: StepHistory
    data: Callable[[], PipelineData]
    writes: ScriptWrites
    redo: Callable[[], None]
    count_to: Callable[[int], None]
    look_alike: Callable[[], None]
    changed_by_hand: Callable[[], int]
    store: Callable[[], Store | None]


@dataclass
class _Return:
    """The way back of one worker: to ``step`` of ``source`` in what began with epoch ``restoring``, then to ``until``.

    ``outer`` is what the worker was in, once it has set out; ``behind``: others were in the next activity already. What
    is done again has activities from ``first_index`` on.
    """

    behind: bool
    source: str
    step: int
    until: int
    restoring: int
    first_index: int
    reason: str
    lost: tuple[WorkerId, ...]
    started_seconds: float
    outer: ActivityState = field(default_factory=ActivityState)
    under_way: int | None = None  # the step that is being done again


class Restoring:
    """One worker's part of it; see the module.

    Args:
        worker: whose stages are brought back.
        memory: its copies; None where none are kept.
        transfer: builds stages that it did not have.
        world: makes the process group of an epoch.
        way_back: does steps again.
    """

    def __init__(
        self,
        worker: Worker,
        *,
        memory: MemoryRounds | None,
        transfer: StateTransfer,
        world: WorldEntry,
        way_back: WayBack,
    ) -> None:
        self._worker = worker
        self._memory = memory
        self._stages = Stages(worker, transfer)
        self._from_memory = (
            None if memory is None else FromMemory(worker, memory=memory, stages=self._stages, transfer=transfer)
        )
        self._world = world
        self._way_back = way_back
        self._pending: _Return | None = None
        self._returns: list[_Return] = []
        self._steps: int | None = None  # that were complete before an attempt which may have changed that

    @property
    def steps(self) -> int:
        """How many iterations are complete, for this worker's report: those of its script, whatever it is loading."""
        return self._worker.step if self._steps is None else self._steps

    @property
    def depth(self) -> int:
        """How many ways back this worker is on: one loss may come on the way back from another."""
        return len(self._returns)

    def kept(self) -> Kept:
        """What this worker could go back to, for its report."""
        store = self._way_back.store()
        parts = {} if self._memory is None else self._memory.parts.held()
        first = self._way_back.history.first
        if self._steps is None and not self._returns:  # else stages are not what the script has left
            first = max(first, self._way_back.changed_by_hand())
        return Kept(parts, first, () if store is None else store.known)

    def interrupt(self) -> None:
        """There is a new epoch."""
        if self._memory is not None:
            self._memory.interrupt()

    # -- bringing a state back ---------------------------------------------------------------------

    def attempt(self, record: EpochRecord, conclusion: Conclusion) -> None:
        """Bring the newest state back that there is, and enter the epoch in which all have it.

        Raises JobFailedError when there is none, and what interrupts the waits: then it is for the caller to recover.
        """
        started, worker, before = time.perf_counter(), self._worker, self._worker.placement
        first, self._steps = self._steps is None, self.steps
        worker.host.drop_incomplete()
        self._world.enter(record)
        worker.activity.adopt(conclusion.agreed)
        if first and worker.activity.kind is None:  # later what optimizers hold is no more what the script left
            self._way_back.writes.follow(modules=True)
        self._way_back.history.note(written=self._way_back.writes.take_written())
        while not self._bring_newest(record, conclusion, started):
            self._give_up(record, before, conclusion)
        self._enter(self._committed(record))

    def enter(self, record: EpochRecord) -> None:
        """``record`` is entered after a loss. Where the epoch that ends the restoring was there and this worker has not
        heard of it, it is on the way back now, as the others are."""
        pending = self._pending
        if pending is not None and record.restoring != pending.restoring:
            self._set_out(pending)
        self._pending = None

    def _bring_newest(self, record: EpochRecord, conclusion: Conclusion, started: float) -> bool:
        """Have all stages in the newest state that can be had as a whole; False where none can."""
        damaged: set[Damaged] = set()
        unread: set[int] = set()
        in_memory = True
        for attempt in itertools.count():
            together = Together(self._worker, record, attempt)
            state = None
            if in_memory:
                state = newest_state(self._worker.grid, conclusion.kept, until=conclusion.steps, without=damaged)
            steps = stored_steps(conclusion.kept, until=conclusion.steps, than=state, without=unread)
            stored = self._store().choose(together, steps) if steps else None
            if stored is not None:
                problem = FromStore(store=self._store(), stages=self._stages).bring(stored, together)
                self._pending = self._way(record, conclusion, STORE, stored, started)
                problems = together.agree(problem, label="loaded")
                if not any(problems.values()):
                    return True
                unread.add(stored)
                self._store().distrust(stored)
                why = next(text for _, text in sorted(problems.items()) if text)
                tell_once(self._worker, f"the checkpoint of step {stored} can't be restored: {why}")
            elif state is not None and self._from_memory is not None:
                found, problem = self._from_memory.bring(state, together)
                self._pending = self._way(record, conclusion, MEMORY, state.step, started)
                agreed = together.agree((sorted(found), problem), label="restored").values()
                new = {one for its, _ in agreed for one in its}
                why = next((text for _, text in agreed if text), "")
                if not new and not why:
                    return True
                damaged |= new
                if why:  # which it will be with every other copy, too
                    in_memory = False
                    tell_once(self._worker, f"the memory checkpoint of step {state.step} can't be restored: {why}")
            else:
                return False
        return False

    def _store(self) -> Store:
        store = self._way_back.store()
        if store is None:
            raise RuntimeError("an epoch that goes back to the store's checkpoints, in a job without")
        return store

    def _way(self, record: EpochRecord, conclusion: Conclusion, source: str, step: int, started: float) -> _Return:
        return _Return(
            behind=self._worker.activity.index < conclusion.activity,
            source=source,
            step=step,
            until=conclusion.steps,
            restoring=record.restoring,
            first_index=conclusion.activity + 1,
            reason=record.reason,
            lost=record.lost,
            started_seconds=started,
        )

    def _give_up(self, record: EpochRecord, before: Placement, conclusion: Conclusion) -> None:
        """Nobody has what was lost; raises what :func:`give_up` raises."""
        session = self._worker.session
        gone = [c for c in before.grid if not set(before.copies_of(c)) & set(record.members)]
        store = self._way_back.store()
        known = "no memory checkpoint" if store is None else f"no memory checkpoint, and none in {store.name},"
        why = (
            f"after the loss of {', '.join(record.lost)} ({record.reason}), and there is {known} that those who are "
            "left could go back to"
        )
        by_hand = sorted(w for w, own in conclusion.kept.items() if own.redoes_from > conclusion.steps)
        if by_hand:
            why += (
                f" (on {', '.join(by_hand)} the script has changed weights, optimizer state, buffers or attributes by "
                f"hand since step {conclusion.step}, which could not be done again)"
            )
        failure = fatal_loss(record.lost[0], gone or tuple(before.grid), why, stores=record.stores)
        give_up(session, record, failure=failure, why=why)

    # -- the epoch that ends it --------------------------------------------------------------------

    def _committed(self, record: EpochRecord) -> EpochRecord:
        """The epoch that says that all have the state; made by one, awaited by all."""
        session = self._worker.session
        final = replace(
            record,
            number=record.number + 1,
            reason="a checkpoint is restored",
            lost=(),
            proposer=session.worker,
            time_seconds=time.time(),
            restoring=-1,
        )
        session.interruption.expect(record.members, record.placement)
        try:
            if proposer(record.members) != session.worker:
                return session.interruption.wait_for_expected(after=record.number)
            if not session.with_retries(lambda: session.coordinator.propose(final, expected=record.number)):
                newest = session.with_retries(session.coordinator.epoch)
                if newest is not None:
                    session.interruption.announce_epoch(newest)
                session.interruption.wait_until(lambda: False)
            return final
        finally:
            session.interruption.expect(None)

    def _enter(self, record: EpochRecord) -> None:
        worker, pending = self._worker, self._pending
        worker.view.adopt(record, record.placement)
        worker.links.extend(
            members=worker.links.members, order=record.members, name=f"{worker.session.identity.job}/{record.number}"
        )
        self._world.enter(record)
        self._pending = None
        if pending is not None:
            self._set_out(pending)

    # -- doing steps again -------------------------------------------------------------------------

    def _set_out(self, way: _Return) -> None:
        """The state is here and everybody's; what comes now is the way back to where the script is."""
        worker, back = self._worker, self._way_back
        self._steps = None
        if not worker.host.replicas():
            back.count_to(way.step)
        if self._memory is not None and way.source == MEMORY:
            self._memory.restored(way.step)
        elif self._memory is not None:
            self._memory.forget()
        back.data().rewind(way.step)
        back.history.begin_at(way.step)
        back.writes.restored(back.history.written_from(way.step))
        back.look_alike()
        way.outer = replace(worker.activity)
        worker.activity.become(ActivityState(index=way.first_index))
        self._returns.append(way)

    def redo(self, *, down_to: int) -> None:
        """Do again what is lost, and put this worker back into the calls that it was in."""
        while len(self._returns) > down_to:
            way = self._returns[-1]
            while (step := self._worker.step) < way.until:
                way.under_way = step
                self._as_before(step)
                self._way_back.redo()
                way.under_way = None
            last = self._worker.activity.previous
            self._meet()
            self._returns.pop()
            self._arrive(way, last)

    def _meet(self) -> None:
        """Nobody goes back to its call before all have done everything again.

        Who is back has other agreements than those of what was done again, and after one more loss would report them
        under the same numbers: others would take them for those that they miss. Of this one only its number counts.
        """
        worker = self._worker

        def body() -> None:
            if not worker.activity.rounds:
                worker.activity.rounds.append(worker.agree(None))

        worker.perform(_MEET, body)

    def _as_before(self, step: int) -> None:
        """What the script has done before ``step``."""
        past = self._way_back.history.of(step)
        self._way_back.writes.write_again(past.written)
        shadows = self._worker.host.shadows
        for replica in self._worker.host.replicas():
            replica.micro_offset += past.evaluated
            for values in past.values:
                values.put_into(replica, shadow=replica.coordinate in shadows)

    def _arrive(self, way: _Return, last: list[Round]) -> None:
        """``last``: the agreements of what was done before the meeting."""
        worker, outer = self._worker, way.outer
        # On the way back from an earlier loss this is done before each step, of which one may be under way.
        if not self._returns or self._returns[-1].under_way == way.until:
            self._as_before(way.until)
            self._way_back.look_alike()  # what was put there is no change of the script's since then
        now, newest = worker.activity.index, way.first_index - 1
        outer.unseen += now - newest
        if outer.kind == _PROTECT and not outer.rounds:
            # All have shadows. Who was behind does not come to that any more, so it is over here, too.
            outer.rounds.append({})
            now -= 1
        outer.index = now - int(way.behind)
        outer.delivered = len(outer.rounds)
        # A loss at the end of the way back may have laid down how what comes next goes on.
        outer.plan, outer.planned = worker.activity.plan, worker.activity.planned
        outer.redone = outer.kind == "train" and bool(outer.rounds)
        outer.previous = worker.activity.previous
        if outer.index < worker.activity.index:
            # It is over, and has the number of the meeting, in which others may still be.
            outer.kind, outer.step, outer.previous = _MEET, way.until, last
        worker.activity.become(outer)
        for replica in worker.host.replicas():
            worker.host.restart(replica, micro_batches=worker.micro_batches)
        worker.host.activate_shown()
        seconds, steps = time.perf_counter() - way.started_seconds, way.until - way.step
        tell_once(
            worker,
            f"step {way.until}: {', '.join(way.lost)} lost with the last copy of a stage; went back to step {way.step} "
            f"from {self._named(way)} and did {steps} {'step' if steps == 1 else 'steps'} again, {seconds:.2f} s",
        )
        fields = {"from_step": way.step, "source": way.source, "redone": steps}
        fields |= {"workers": list(way.lost), "reason": way.reason}
        worker.session.log("restored", step=way.until, **fields, seconds=seconds)

    def _named(self, way: _Return) -> str:
        return "memory" if way.source == MEMORY else self._store().name
