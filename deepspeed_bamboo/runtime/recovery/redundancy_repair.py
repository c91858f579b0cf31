"""After a loss: every coordinate gets a shadow again (architecture 5, point 6)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from deepspeed_bamboo.coordination import EpochRecord
from deepspeed_bamboo.core.consensus import Conclusion
from deepspeed_bamboo.core.grid import Coordinate
from deepspeed_bamboo.core.placement import Placement, WorkerId
from deepspeed_bamboo.runtime.comm.epoch_monitor import EpochChangedError
from deepspeed_bamboo.runtime.iteration.activity import Round
from deepspeed_bamboo.runtime.iteration.worker import Worker
from deepspeed_bamboo.runtime.job.news import tell_once
from deepspeed_bamboo.runtime.recovery.acquaintances import Acquaintances
from deepspeed_bamboo.runtime.recovery.shadow_rebuild import ShadowRebuild, with_rebuilt
from deepspeed_bamboo.runtime.recovery.state_transfer import StateTransfer, check_copied


class RedundancyRepair:
    """One worker's part of it.

    Args:
        worker: whose placement lacks shadows.
        shadow_rebuild: brings shadows back beside an iteration.
        transfer: brings the rest at its end.
        last_loss: returns what survivors concluded after the last loss, None before the first.
    """

    def __init__(
        self,
        worker: Worker,
        *,
        shadow_rebuild: ShadowRebuild,
        transfer: StateTransfer,
        last_loss: Callable[[], Conclusion | None],
    ) -> None:
        self._worker = worker
        self._shadow_rebuild = shadow_rebuild
        self._transfer = transfer
        self._last_loss = last_loss
        self._acquaintances = Acquaintances(worker.links, me=worker.me)
        self._said_alone = -1  # the epoch in which it was said that one worker is left

    def _strike(self, at: str) -> None:
        for replica in self._worker.host.owners():
            self._worker.strike_if_scripted(replica.coordinate, at)

    def count_on_rebuilt(self, agreed: Round) -> None:
        """After the agreement of an iteration: the shadows that were rebuilt beside it are shadows, step included."""
        worker = self._worker
        before = worker.placement
        worker.view.place(with_rebuilt(before, agreed, epoch=worker.epoch))
        complete = worker.protected(worker.record.members) == worker.placement
        if complete and worker.placement != before and worker.leads:
            self._propose(worker.record)

    def repair(self) -> None:
        """Give every unprotected coordinate a shadow on another live worker, if there is one; collective.

        Done at an iteration boundary. Mostly that has happened beside the iteration (:class:`ShadowRebuild`); what is
        missing still is copied now. Becomes part of the epoch only once every copy is complete; a loss meanwhile
        leaves things as they were, and the next iteration tries again.
        """
        worker = self._worker
        beside = self._shadow_rebuild.end()
        record = worker.record
        self._acquaintances.keep(worker.placement, members=record.members)
        if not worker.protects or not self._takes_part():
            return
        if worker.protected(record.members) == worker.placement:
            if beside is not None:
                self._say(record, seconds=beside[0], waited_seconds=beside[1])
            elif len(record.members) == 1 and self._last_loss() is not None and self._said_alone != record.number:
                self._said_alone = record.number
                tell_once(worker, f"one worker is left, and {_after_its_loss(worker)}, unless another one joins before")
            return
        copied: list[tuple[EpochRecord, Placement]] = []
        started = time.perf_counter()

        def copy() -> tuple[str, ...]:
            copied.clear()
            current = worker.record
            self._strike("protect")
            self._drop_unlisted_shadows()
            target = worker.protected(current.members)
            missing = target.shadows_beyond(worker.placement)
            self._meet(missing)
            problems = self._transfer.copy_shadows(worker.placement, shadows=missing, label=str(worker.activity.index))
            copied.append((current, target))
            return problems

        check_copied(problem for problems in worker.agree_on("protect", copy).values() for problem in problems)
        if not copied or worker.record is not copied[0][0]:
            return
        current, target = copied[0]
        worker.view.place(target)
        seconds = time.perf_counter() - started
        self._say(current, seconds=seconds, waited_seconds=seconds)
        if worker.leads:
            self._propose(current)

    def _meet(self, missing: Iterable[tuple[Coordinate, WorkerId]]) -> None:
        """Make all channels that are used next, before any is: one by one, workers could wait in a circle."""
        placement, me = self._worker.placement, self._worker.me
        pairs = [(placement.owner(coordinate), holder) for coordinate, holder in missing]
        partners = {holder for owner, holder in pairs if owner == me} | {o for o, holder in pairs if holder == me}
        self._worker.links.connect(sorted(partners), with_lanes=partners)

    def _takes_part(self) -> bool:
        """The same answer on every worker that comes to this boundary, though some may have passed it before a loss."""
        index, conclusion = self._worker.activity.index, self._last_loss()
        if conclusion is None or index > conclusion.activity:
            return True
        return index == conclusion.activity and conclusion.kind == "protect"

    def _say(self, current: EpochRecord, *, seconds: float, waited_seconds: float) -> None:
        worker = self._worker
        self._strike("protected")
        worker.log_event("protected", seconds=seconds, waited_seconds=waited_seconds)
        alone = len(current.members) == 1
        state = "no other worker is left, another loss ends the job" if alone else _survived_again(worker.placement)
        tell_once(
            worker,
            f"step {worker.step}: shadows rebuilt in {seconds:.2f} s, {waited_seconds:.2f} s of it waited for, "
            + state,
        )

    def _propose(self, current: EpochRecord) -> None:
        worker = self._worker
        session = worker.session
        record = replace(
            current,
            number=current.number + 1,
            placement=worker.placement,
            reason="shadows rebuilt",
            lost=(),
            proposer=session.worker,
            time_seconds=time.time(),
        )
        # A new epoch, of a loss that somebody proposed first, interrupts the next activity.
        with contextlib.suppress(EpochChangedError):
            if not session.with_retries(lambda: session.coordinator.propose(record, expected=current.number)):
                session.interruption.notify()

    def _drop_unlisted_shadows(self) -> None:
        worker = self._worker
        listed = worker.placement.shadowed_by(worker.me)
        for coordinate in [c for c in worker.host.shadows if c not in listed]:
            worker.host.shadows.pop(coordinate).finish_step()


def _after_its_loss(worker: Worker) -> str:
    if worker.session.config.waits_seconds:
        return "its loss has the job start anew from checkpoint.dir"
    return "its loss ends the job"


def _survived_again(placement: Placement) -> str:
    if len(placement.shadows) < len(placement.owners):
        bare = len(placement.owners) - len(placement.shadows)
        return (
            f"but {bare} of {len(placement.owners)} stages can have none, and the loss of their workers is not survived"
        )
    if placement.copies == 1:
        return "another loss is survived again"
    if len(placement.second_shadows) == len(placement.owners):
        return "every stage has two, any two workers may be lost at once again"
    return "there are too few workers for two of each stage, another loss is survived again"
