"""What a worker does when its epoch ends: recover, take over what was lost, and plan the rest."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from deepspeed_bamboo.coordination import EpochRecord
from deepspeed_bamboo.core.consensus import Report, Settlement
from deepspeed_bamboo.core.grid import Coordinate
from deepspeed_bamboo.core.instructions import Instruction, Op
from deepspeed_bamboo.core.placement import Placement
from deepspeed_bamboo.core.planning import plan_inference, plan_iteration
from deepspeed_bamboo.core.progress import CoordinateProgress
from deepspeed_bamboo.core.recovery import progress_after_loss, redundant_after_loss
from deepspeed_bamboo.core.schedule import Mode, Plan
from deepspeed_bamboo.core.script_ranks import own_rank
from deepspeed_bamboo.runtime.comm.c10d import c10d
from deepspeed_bamboo.runtime.comm.epoch_monitor import EpochChangedError, PeerLostError
from deepspeed_bamboo.runtime.comm.peers import Links
from deepspeed_bamboo.runtime.iteration.activity import Round
from deepspeed_bamboo.runtime.iteration.mode_choice import ModeChoice
from deepspeed_bamboo.runtime.job.news import tell, tell_once
from deepspeed_bamboo.runtime.recovery.regroup import PAUSE, PauseClock, Recovery, agreed_pause
from deepspeed_bamboo.runtime.recovery.script_server import ScriptServer
from deepspeed_bamboo.runtime.recovery.shadow_rebuild import with_rebuilt
from deepspeed_bamboo.runtime.recovery.state_transfer import copy_from_other_pipeline, copy_shadows
from deepspeed_bamboo.runtime.stock.replica import StageReplica
from deepspeed_bamboo.runtime.stock.world import WorldGroup, replace_default_group

if TYPE_CHECKING:
    from deepspeed_bamboo.runtime.engine import BambooPipelineEngine


class Failover:
    """Failover and renewed protection of one worker."""

    def __init__(self, engine: BambooPipelineEngine) -> None:
        self._engine = engine
        links: Links = engine.links
        self._recovery = Recovery(
            engine.session,
            links=links,
            report=self._report,
            suspicion_seconds=engine.session.config.coordinator.suspicion_limit_seconds,
            point=self._strike_in_recovery,
        )
        self.modes = ModeChoice(engine)
        self.script = ScriptServer(engine, recover=self.run)
        self._clock: PauseClock | None = None
        self._lost_coordinates: tuple[Coordinate, ...] = ()
        self._lost_at = 0.0
        self._attempts: Counter[tuple[int, Coordinate]] = Counter()
        self._fresh: tuple[Placement, int, Mode, Plan] | None = None
        self._settlement: Settlement | None = None  # of the last loss
        # Coordinates that this worker owns by copying another pipeline's state, which it has yet to do.
        self._to_copy: list[Coordinate] = []

    @property
    def recovering(self) -> bool:
        """True in the rest of an iteration that a loss has interrupted."""
        return self._clock is not None

    def attempt(self, coordinate: Coordinate, *, step: int) -> int:
        """How often ``coordinate`` has changed hands in ``step``."""
        return self._attempts[step, coordinate]

    def fresh_plan(self) -> Plan:
        """The plan of an undisturbed iteration in the current placement."""
        engine = self._engine
        key = (engine.placement, engine.micro_batches, self.modes.planned)
        if self._fresh is None or self._fresh[:3] != key:
            plan = plan_iteration(engine.placement, micro_batches=engine.micro_batches, mode=self.modes.planned)
            self._fresh = (*key, plan)
        return self._fresh[3]

    def enter_world(self, record: EpochRecord) -> None:
        """Make the members of ``record`` torch's default process group, with the ranks of what they host."""
        engine, groups = self._engine, self._engine.script_groups
        own = own_rank(record.placement, engine.session.worker, members=record.members)
        groups.server = self.script
        replace_default_group(
            WorldGroup(own, len(record.members), all_ranks=len(engine.job_grid), server=self.script, groups=groups)
        )
        engine.global_rank = c10d.get_rank()
        engine.host.name_ranks(own)

    def run(self, cause: EpochChangedError | PeerLostError) -> None:
        """Bring this worker into the newest epoch and lay down what is left to do in the current activity."""
        engine = self._engine
        engine.session.pulse.at("recovery from a loss")
        before, epoch = engine.placement, engine.epoch
        engine.rebuilding.end()
        record, settlement, clock = self._recovery.recover(cause, placement=before)
        after = record.placement
        engine.host.drop_incomplete()
        taken = [c for c in after.hosted_by(engine.session.worker) if c not in engine.host.owned]
        self._to_copy = [coordinate for coordinate in taken if coordinate not in engine.host.shadows]
        engine.host.take_roles(
            owned=after.hosted_by(engine.session.worker), shadows=after.shadowed_by(engine.session.worker)
        )
        engine.placement = after
        self._lost_coordinates = tuple(c for c in after.grid if after.owner(c) != before.owner(c))
        behind = engine.activity.kind == "train" and engine.activity.index < settlement.activity
        for coordinate in self._lost_coordinates:
            self._attempts[engine.global_steps + behind, coordinate] += 1
        self._clock = clock
        self.modes.lost(len(clock.lost))
        self._lost_at = record.time_seconds
        self.enter_world(record)
        engine.activity.adopt(settlement.agreed)
        if engine.activity.kind == "train" and engine.activity.rounds:
            # As those have it who have ended this iteration already.
            before = with_rebuilt(before, engine.activity.rounds[0], epoch=epoch)
        self._settle(settlement, before=before, after=after, taken=taken)
        self._strike_in_recovery("resume")

    def _strike_if_scripted(self, at: str) -> None:
        for replica in self._engine.host.owners():
            self._engine.strike_if_scripted(replica.coordinate, at, None)

    def _strike_in_recovery(self, at: str) -> None:
        """Scripted is the interrupted step. A worker that is in the end of the one before may not know of it yet."""
        self._strike_if_scripted(at)
        if self._engine.activity.kind == "train":
            for replica in self._engine.host.owners():
                self._engine.strike_if_scripted(replica.coordinate, at, None, step=self._engine.global_steps + 1)

    def _settle(self, settlement: Settlement, *, before: Placement, after: Placement, taken: list[Coordinate]) -> None:
        engine, activity = self._engine, self._engine.activity
        self._settlement = settlement
        undecided_here = activity.index == settlement.activity and not activity.rounds
        progress = self._progress(settlement, before=before, after=after)
        if undecided_here and settlement.kind == "train":
            engine.iteration_end.abandon()
        if not (activity.rounds and activity.kind == "train"):
            # Otherwise the step that was agreed upon comes first.
            self.copy_lost()
        if undecided_here and settlement.kind == "train":
            for coordinate in taken:
                self._take_over(engine.host.owned[coordinate], progress[coordinate])
        activity.plan = None
        if settlement.decided or settlement.kind not in ("train", "evaluate"):
            return
        activity.planned = settlement.activity
        if settlement.kind == "evaluate":
            activity.plan = plan_inference(after, micro_batches=engine.evaluated_micro_batches)
            return
        activity.plan = plan_iteration(
            after,
            micro_batches=engine.micro_batches,
            progress=progress,
            redundant=redundant_after_loss(before, after, settlement.redundant),
            mode=self.modes.planned,
        )
        self._set_targets(settlement, taken)

    def _progress(
        self, settlement: Settlement, *, before: Placement, after: Placement
    ) -> dict[Coordinate, CoordinateProgress]:
        reports = {c: settlement.progress.get(c, CoordinateProgress()) for c in after.grid}
        redundant = settlement.redundant
        return progress_after_loss(
            before,
            after,
            reports,
            redundant_forwards={c: counts.forwards for c, counts in redundant.items()},
            redundant_backwards={c: counts.backwards for c, counts in redundant.items()},
        )

    def copy_lost(self) -> None:
        """Copy from another pipeline what was lost with its shadow. Called between two steps only."""
        while self._to_copy:
            copy_from_other_pipeline(self._engine, self._to_copy[0])
            del self._to_copy[0]

    def _take_over(self, replica: StageReplica, progress: CoordinateProgress) -> None:
        """Start a promoted shadow where its stored redundant work ends."""
        engine = self._engine
        if progress.forwards == 0:
            engine.host.restart(replica, micro_batches=engine.micro_batches)
        elif progress.backwards == 0:
            engine.host.forget_gradients(replica)
        replica.progress = progress

    def _set_targets(self, settlement: Settlement, taken: list[Coordinate]) -> None:
        """How far each lost coordinate had been, as its neighbours saw it: when that is redone, it has caught up."""
        if self._clock is None:
            return
        for coordinate in taken:
            after = settlement.progress.get(Coordinate(coordinate.pipeline, coordinate.stage + 1))
            previous = settlement.progress.get(Coordinate(coordinate.pipeline, coordinate.stage - 1))
            backwards = previous.gradients_received if previous else (after.backwards if after else 0)
            forwards = after.activations_received if after else backwards
            self._clock.taken_over[coordinate] = (forwards, backwards)
            replica = self._engine.host.owned.get(coordinate)
            # What is copied from another pipeline may have to wait for this worker's step, and starts from nothing.
            kept = replica.progress if replica else CoordinateProgress()
            self._clock.recomputed["forwards"] += max(0, forwards - kept.forwards)
            self._clock.recomputed["backwards"] += max(0, backwards - kept.backwards)

    def before(self, instruction: Instruction) -> None:
        """Note when the first lost instruction is done again."""
        clock = self._clock
        if clock is None or clock.first_recomputed or instruction.op not in (Op.FNC, Op.BNC):
            return
        if not clock.taken_over or instruction.coordinate in clock.taken_over:
            clock.first_recomputed = time.time()

    def after(self, replica: StageReplica) -> None:
        """Note when what was lost is done again."""
        clock = self._clock
        if clock is None or replica.coordinate not in clock.taken_over:
            return
        forwards, backwards = clock.taken_over[replica.coordinate]
        if replica.progress.forwards >= forwards and replica.progress.backwards >= backwards:
            del clock.taken_over[replica.coordinate]
            clock.caught_up = time.time()

    def log_if_any(self) -> None:
        """Write the events of a failover once the iteration that it interrupted is done."""
        clock, engine = self._clock, self._engine
        if clock is None:
            return
        self._clock = None
        parts = clock.parts(lost_at=self._lost_at)
        fields = {
            "lost": [str(c) for c in self._lost_coordinates],
            "workers": list(clock.lost),
            "recomputed": clock.recomputed,
            "regrouped_t": clock.regrouped,
            "first_recomputed_t": clock.first_recomputed or clock.regrouped,
        }
        step, pause = engine.global_steps - 1, agreed_pause(engine.activity.previous[0], epoch=engine.epoch) or parts
        if engine.is_reporter:
            engine.session.log("loss_of_node", step=step, **fields, pause_seconds=pause)
        taken_over = self._taken_over()
        if taken_over:
            lost = ", ".join(clock.lost)
            tell(engine, f"step {step}: took {', '.join(taken_over)} over from {lost}, pause {pause['total']:.2f} s")
            hosted = " ".join(map(str, engine.placement.hosted_by(engine.session.worker)))
            tell(engine, f"module.named_parameters() and state_dict() have the weights of {hosted} here from now on")
            self.modes.repeated(parts["recompute"])
        self._say_unprotected()
        engine.session.log("failover", step=step, **fields, pause_seconds=parts, taken_over=taken_over)

    def contribution(self) -> dict[str, Any]:
        """What this worker hands in with the agreement of an interrupted iteration: its pause."""
        if self._clock is None:
            return {}
        parts = self._clock.parts(lost_at=self._lost_at)
        return {PAUSE: (self._engine.epoch, bool(self._taken_over()), parts)}

    def _taken_over(self) -> list[str]:
        """Of what was lost, the coordinates that this worker hosts now."""
        hosted = self._engine.placement.hosted_by(self._engine.session.worker)
        return [str(c) for c in self._lost_coordinates if c in hosted]

    def count_on_rebuilt(self, agreed: Round) -> None:
        """After the agreement of an iteration: the shadows that were rebuilt beside it are shadows, step included."""
        engine = self._engine
        record, before = engine.session.interruption.active, engine.placement
        engine.placement = with_rebuilt(before, agreed, epoch=engine.epoch)
        complete = record is not None and engine.protected(record.members) == engine.placement
        if record is not None and complete and engine.placement != before and engine.is_reporter:
            self._propose_protected(record)

    def protect_again(self) -> None:
        """Give every unprotected coordinate a shadow on another live worker, if there is one; collective.

        Done at an iteration boundary. Mostly that has happened beside the iteration, see :class:`Rebuilding`; what is
        missing still is copied now. Becomes part of the epoch only once every copy is complete; a loss meanwhile
        leaves things as they were, and the next iteration tries again.
        """
        engine, interruption = self._engine, self._engine.session.interruption
        beside = engine.rebuilding.end()
        record = interruption.active
        if record is None or not engine.protects or not self._takes_part_in_protecting():
            return
        if engine.protected(record.members) == engine.placement:
            if beside is not None:
                self._say_protected(record, seconds=beside[0], waited_seconds=beside[1])
            return
        copied: list[tuple[EpochRecord, Placement]] = []
        started = time.perf_counter()

        def copy() -> None:
            copied.clear()
            current = interruption.active
            if current is None:
                raise RuntimeError("no epoch has been entered")
            self._strike_if_scripted("protect")
            self._drop_unlisted_shadows()
            target = engine.protected(current.members)
            missing = target.shadows_beyond(engine.placement)
            copy_shadows(engine, engine.placement, shadows=missing, label=str(engine.activity.index))
            copied.append((current, target))

        engine.agree_on("protect", copy)
        if not copied or interruption.active is not copied[0][0]:
            return
        current, engine.placement = copied[0]
        seconds = time.perf_counter() - started
        self._say_protected(current, seconds=seconds, waited_seconds=seconds)
        if engine.is_reporter:
            self._propose_protected(current)

    def _takes_part_in_protecting(self) -> bool:
        """The same answer on every worker that comes to this boundary, though some may have passed it before a loss."""
        index, settlement = self._engine.activity.index, self._settlement
        if settlement is None or index > settlement.activity:
            return True
        return index == settlement.activity and settlement.kind == "protect"

    def _say_protected(self, current: EpochRecord, *, seconds: float, waited_seconds: float) -> None:
        engine = self._engine
        self._strike_if_scripted("protected")
        engine.log_event("protected", seconds=seconds, waited_seconds=waited_seconds)
        alone = len(current.members) == 1
        state = "no other worker is left, another loss ends the job" if alone else "another loss is survived again"
        tell_once(
            engine,
            f"step {engine.global_steps}: shadows rebuilt in {seconds:.2f} s, {waited_seconds:.2f} s of it waited for, "
            + state,
        )

    def _say_unprotected(self) -> None:
        """After a loss: which stages nobody else can take over any more, for want of their data."""
        engine, record = self._engine, self._engine.session.interruption.active
        if record is None or not engine.protects or not engine.confined:
            return
        covered = dict(engine.protected(record.members).shadows)
        bare = [coordinate for coordinate in engine.job_grid if coordinate not in covered]
        if bare:
            owners = sorted({engine.placement.owner(coordinate) for coordinate in bare})
            tell_once(
                engine,
                f"nobody else has the data of {' '.join(map(str, bare))} (pipeline.stage): the loss of "
                f"{' or '.join(owners)} ends the job (engine.set_data_source would let others stand in)",
            )

    def _propose_protected(self, current: EpochRecord) -> None:
        engine = self._engine
        session = engine.session
        record = replace(
            current,
            number=current.number + 1,
            placement=engine.placement,
            reason="shadows rebuilt",
            lost=(),
            proposer=session.worker,
            time_seconds=time.time(),
        )
        if not session.insist(lambda: session.coordinator.propose(record, expected=current.number)):
            session.interruption.notify()  # somebody proposed a loss first; it will interrupt us

    def _drop_unlisted_shadows(self) -> None:
        engine = self._engine
        listed = engine.placement.shadowed_by(engine.session.worker)
        for coordinate in [c for c in engine.host.shadows if c not in listed]:
            engine.host.shadows.pop(coordinate).settle()

    def _report(self) -> Report:
        engine = self._engine
        redundant = {}
        for coordinate, replica in engine.host.shadows.items():
            stored = replica.progress
            if replica.mirrored and stored.backwards:
                # Its gradients are the owner's reduced ones now, which can't be reduced once more.
                stored = CoordinateProgress()
            if engine.placement.shadow(coordinate) == engine.session.worker:
                redundant[coordinate] = stored
        owned = {replica.coordinate: replica.progress for replica in engine.host.owners()}
        return engine.activity.report(owned, redundant=redundant)
