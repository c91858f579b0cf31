"""What a worker does when its epoch ends: recover, take over what was lost, and plan the rest."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from deepspeed_bamboo.core.between_steps import missing
from deepspeed_bamboo.core.consensus import Conclusion, Report
from deepspeed_bamboo.core.grid import Coordinate
from deepspeed_bamboo.core.instructions import Instruction, Op
from deepspeed_bamboo.core.placement import Placement, WorkerId
from deepspeed_bamboo.core.planning import plan_inference, plan_iteration
from deepspeed_bamboo.core.progress import CoordinateProgress
from deepspeed_bamboo.core.recovery import progress_by_holders
from deepspeed_bamboo.runtime.comm.epoch_monitor import EpochChangedError, PeerLostError
from deepspeed_bamboo.runtime.iteration.mode_choice import ModeChoice
from deepspeed_bamboo.runtime.iteration.worker import Worker
from deepspeed_bamboo.runtime.job.news import tell, tell_once
from deepspeed_bamboo.runtime.recovery.regroup import PAUSE, PauseClock, Recovery, agreed_pause
from deepspeed_bamboo.runtime.recovery.restore import Restoring
from deepspeed_bamboo.runtime.recovery.shadow_rebuild import ShadowRebuild
from deepspeed_bamboo.runtime.recovery.state_transfer import StateTransfer
from deepspeed_bamboo.runtime.recovery.world_entry import WorldEntry
from deepspeed_bamboo.runtime.stock.replica import StageReplica
from deepspeed_bamboo.runtime.stock.torch_modes import training_modes


class Failover:
    """Failover of one worker.

    Args:
        worker: whose epoch ends.
        transfer: copies what was lost with its shadow from another pipeline.
        shadow_rebuild: what it had begun is given up.
        modes: in which mode the rest is planned.
        world: makes the process group of the new epoch.
        abandon: puts gradients back to before the reduction, in an iteration that nobody has ended.
        evaluated_micro_batches: returns how many micro-batches the evaluation in progress has.
        restoring: brings a state of before back, after a loss of the last live copy of a stage.
    """

    def __init__(
        self,
        worker: Worker,
        *,
        transfer: StateTransfer,
        shadow_rebuild: ShadowRebuild,
        modes: ModeChoice,
        world: WorldEntry,
        abandon: Callable[[], None],
        evaluated_micro_batches: Callable[[], int],
        restoring: Restoring,
    ) -> None:
        self._worker = worker
        self._transfer = transfer
        self._shadow_rebuild = shadow_rebuild
        self._modes = modes
        self._world = world
        self._abandon = abandon
        self._evaluated_micro_batches = evaluated_micro_batches
        self._restoring = restoring
        self._recovery = Recovery(
            worker.session,
            links=worker.links,
            view=worker.view,
            report=self._report,
            suspicion_seconds=worker.session.config.coordinator.suspicion_limit_seconds,
            point=self._strike_in_recovery,
        )
        self._clock: PauseClock | None = None
        self._lost_coordinates: tuple[Coordinate, ...] = ()
        self._lost_at = 0.0
        self._attempts: Counter[tuple[int, Coordinate]] = Counter()
        self._conclusion: Conclusion | None = None  # of the last loss
        # Coordinates that this worker owns by copying another pipeline's state, which it has yet to do.
        self._to_copy: list[Coordinate] = []
        self._script_waits = False  # its call has yet to return, so it has computed nothing without a stage

    @property
    def recovering(self) -> bool:
        """True in the rest of an iteration that a loss has interrupted."""
        return self._clock is not None

    @property
    def conclusion(self) -> Conclusion | None:
        """What survivors concluded after the last loss; None before the first."""
        return self._conclusion

    def attempt(self, coordinate: Coordinate, *, step: int) -> int:
        """How often ``coordinate`` has changed hands in ``step``."""
        return self._attempts[step, coordinate]

    @property
    def redoing(self) -> bool:
        """True while steps are done again that the script has done already."""
        return self._restoring.depth > 0

    def before_script(self) -> None:
        """A call returns to the script: take over what is known to be lost, so that the script finds all stages."""
        try:
            self._worker.session.interruption.check()
        except EpochChangedError as cause:
            self._script_waits = True
            try:
                self.run(cause)
            finally:
                self._script_waits = False

    def run(self, cause: EpochChangedError | PeerLostError) -> None:
        """Bring this worker into the newest epoch and lay down what is left to do in the current activity.

        Where a state of before had to be restored, the steps since then are done again before this returns. The call
        that was interrupted may be within a block of the script's, as ``torch.no_grad()``, which is none of this.
        """
        with training_modes():
            self._run_through(cause)

    def _run_through(self, cause: EpochChangedError | PeerLostError) -> None:
        depth = self._restoring.depth
        while True:
            try:
                self._run(cause)
                break
            except (EpochChangedError, PeerLostError) as again:
                cause = again
        self._restoring.redo(down_to=depth)

    def _run(self, cause: EpochChangedError | PeerLostError) -> None:
        worker = self._worker
        worker.session.pulse.at("recovery from a loss")
        before = worker.placement
        self._shadow_rebuild.end()
        self._restoring.interrupt()
        record, conclusion, clock = self._recovery.recover(cause, placement=before)
        self._say_what_was_missing(conclusion, before=before, after=record.placement, lost=clock.lost)
        if record.restoring >= 0:
            self._clock, self._to_copy = None, []  # what an earlier loss left to do comes back with the state
            self._modes.lost(len(clock.lost))
            self._abandon()
            self._restoring.attempt(record, conclusion)
            return
        after = record.placement
        worker.host.drop_incomplete()
        taken = [c for c in after.hosted_by(worker.me) if c not in worker.host.owned]
        self._to_copy = [coordinate for coordinate in taken if coordinate not in worker.host.shadows]
        worker.host.take_roles(owned=after.hosted_by(worker.me), shadows=after.shadowed_by(worker.me))
        worker.view.place(after)
        self._lost_coordinates = tuple(c for c in after.grid if after.owner(c) != before.owner(c))
        behind = worker.activity.kind == "train" and worker.activity.index < conclusion.activity
        for coordinate in self._lost_coordinates:
            self._attempts[worker.step + behind, coordinate] += 1
        self._clock = clock
        self._modes.lost(len(clock.lost))
        self._lost_at = record.time_seconds
        self._world.enter(record)
        worker.activity.adopt(conclusion.agreed)
        self._settle(conclusion, after=after, taken=taken)
        self._strike_in_recovery("resume")

    def _strike_if_scripted(self, at: str) -> None:
        for replica in self._worker.host.owners():
            self._worker.strike_if_scripted(replica.coordinate, at)

    def _strike_in_recovery(self, at: str) -> None:
        """Scripted is the interrupted step. A worker that is in the end of the one before may not know of it yet."""
        self._strike_if_scripted(at)
        if self._worker.activity.kind == "train":
            for replica in self._worker.host.owners():
                self._worker.strike_if_scripted(replica.coordinate, at, step=self._worker.step + 1)

    def _settle(self, conclusion: Conclusion, *, after: Placement, taken: list[Coordinate]) -> None:
        worker, activity = self._worker, self._worker.activity
        self._conclusion = conclusion
        undecided_here = activity.index == conclusion.activity and not activity.rounds
        progress, redundant = progress_by_holders(after, owned=conclusion.owned, stored=conclusion.stored)
        if undecided_here and conclusion.kind == "train":
            self._abandon()
        if not (activity.rounds and activity.kind == "train"):
            # Otherwise the step that was agreed upon comes first.
            self.copy_lost()
        if undecided_here and conclusion.kind == "train":
            for coordinate in taken:
                self._take_over(worker.host.owned[coordinate], progress[coordinate])
        activity.plan = None
        if conclusion.decided or conclusion.kind not in ("train", "evaluate"):
            return
        activity.planned = conclusion.activity
        if conclusion.kind == "evaluate":
            activity.plan = plan_inference(after, micro_batches=self._evaluated_micro_batches())
            return
        activity.plan = plan_iteration(
            after,
            micro_batches=worker.micro_batches,
            progress=progress,
            redundant=redundant,
            mode=self._modes.planned,
        )
        self._set_targets(conclusion, taken)

    def copy_lost(self) -> None:
        """Copy from another pipeline what was lost with its shadow. Called between two steps only."""
        while self._to_copy:
            self._transfer.copy_from_other_pipeline(self._to_copy[0])
            del self._to_copy[0]

    def _take_over(self, replica: StageReplica, progress: CoordinateProgress) -> None:
        """Start a promoted shadow where its stored redundant work ends."""
        worker = self._worker
        if progress.forwards == 0:
            worker.host.restart(replica, micro_batches=worker.micro_batches)
        elif progress.backwards == 0:
            worker.host.forget_gradients(replica)
        replica.progress = progress

    def _set_targets(self, conclusion: Conclusion, taken: list[Coordinate]) -> None:
        """How far each lost coordinate had been, as its neighbours saw it: when that is redone, it has caught up."""
        if self._clock is None:
            return
        for coordinate in taken:
            after = conclusion.progress.get(Coordinate(coordinate.pipeline, coordinate.stage + 1))
            previous = conclusion.progress.get(Coordinate(coordinate.pipeline, coordinate.stage - 1))
            backwards = previous.gradients_received if previous else (after.backwards if after else 0)
            forwards = after.activations_received if after else backwards
            self._clock.taken_over[coordinate] = (forwards, backwards)
            replica = self._worker.host.owned.get(coordinate)
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
        clock, worker = self._clock, self._worker
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
        step, pause = worker.step - 1, agreed_pause(worker.activity.previous[0], epoch=worker.epoch) or parts
        if worker.is_reporter:
            worker.session.log("loss_of_node", step=step, **fields, pause_seconds=pause)
        taken_over = self._taken_over()
        if taken_over:
            lost = ", ".join(clock.lost)
            tell(worker, f"step {step}: took {', '.join(taken_over)} over from {lost}, pause {pause['total']:.2f} s")
            hosted = " ".join(map(str, worker.placement.hosted_by(worker.me)))
            tell(
                worker,
                f"module.named_parameters() and state_dict() have the weights of {hosted} here from now on, and "
                "engine.is_first_stage() and is_last_stage() are true here where these are among them",
            )
            self._modes.repeated(parts["recompute"])
        self._say_unprotected()
        self._say_fewer_copies()
        worker.session.log("failover", step=step, **fields, pause_seconds=parts, taken_over=taken_over)

    def contribution(self) -> dict[str, Any]:
        """What this worker contributes to the agreement of an interrupted iteration: its pause."""
        if self._clock is None:
            return {}
        parts = self._clock.parts(lost_at=self._lost_at)
        return {PAUSE: (self._worker.epoch, bool(self._taken_over()), parts)}

    def _taken_over(self) -> list[str]:
        """Of what was lost, the coordinates that this worker hosts now."""
        hosted = self._worker.placement.hosted_by(self._worker.me)
        return [str(c) for c in self._lost_coordinates if c in hosted]

    def _say_what_was_missing(
        self, conclusion: Conclusion, *, before: Placement, after: Placement, lost: tuple[WorkerId, ...]
    ) -> None:
        """On who takes a stage over that nobody had while this worker's script may have computed something.

        Others have given what they have to what scripts compute together. Steps that are done again are no script's.
        """
        worker = self._worker
        if self._script_waits or self.redoing or worker.activity.index < conclusion.activity:
            return
        coordinates, certain = missing(conclusion, before=before, lost=lost)
        taken = " ".join(str(c) for c in coordinates if after.owner(c) == worker.me)
        if not taken:
            return
        since = f"since step {conclusion.step - 1}" if conclusion.step else "before the first step"
        between = "between two calls of the engine"
        lacks = (
            f"what was computed {since} from parameters, or by rank or stage (a sum, an export, a broadcast from one "
            f"rank), lacks {taken}, which this worker has from now on. engine.agree_on(name, function) calls its "
            "function again after a loss. Files that the lost worker's script was still to write then are missing"
        )
        call = "the evaluation" if conclusion.kind == "evaluate" else f"step {conclusion.step}"
        maybe = f"before anything of {call} came from there. If that was {between}, {lacks}"
        tell(worker, f"{', '.join(lost)} was lost {f'{between}: {lacks}' if certain else maybe}")

    def _say_unprotected(self) -> None:
        """After a loss: which stages nobody else can take over any more, for want of their data."""
        worker = self._worker
        if not worker.protects or not worker.confined:
            return
        covered = dict(worker.protected(worker.record.members).shadows)
        bare = [coordinate for coordinate in worker.grid if coordinate not in covered]
        if bare:
            owners = sorted({worker.placement.owner(coordinate) for coordinate in bare})
            tell_once(
                worker,
                f"nobody else has the data of {' '.join(map(str, bare))} (pipeline.stage): the loss of "
                f"{' or '.join(owners)} ends the job (engine.set_data_source would let others stand in)",
            )

    def _say_fewer_copies(self) -> None:
        """After a loss: that there are not workers enough for two shadows any more."""
        left = self._worker.record.members
        if self._worker.placement.copies > 1 and len(left) == 2:
            tell_once(
                self._worker,
                f"only {' and '.join(left)} are left: every stage has one shadow, so either may be lost, not both at "
                "once",
            )

    def _report(self) -> Report:
        worker = self._worker
        self._restoring.enter(worker.record)
        redundant = {}
        for coordinate, replica in worker.host.shadows.items():
            stored = replica.progress
            if replica.mirrored and stored.backwards:
                # Its gradients are the owner's reduced ones now, which can't be reduced once more.
                stored = CoordinateProgress()
            if worker.placement.shadow(coordinate) == worker.me:
                redundant[coordinate] = stored
        owned = {replica.coordinate: replica.progress for replica in worker.host.owners()}
        return worker.activity.report(
            owned, redundant=redundant, step=self._restoring.steps, kept=self._restoring.kept()
        )
