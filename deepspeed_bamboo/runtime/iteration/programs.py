"""What a worker executes next: the plan for the current placement, or what a recovery has planned."""

from __future__ import annotations

from collections.abc import Callable

from deepspeed_bamboo.core.instructions import Instruction, Op
from deepspeed_bamboo.core.placement import Placement
from deepspeed_bamboo.core.planning import plan_inference, plan_iteration
from deepspeed_bamboo.core.schedule import Mode, Plan
from deepspeed_bamboo.runtime.iteration.messages import IterationContext
from deepspeed_bamboo.runtime.iteration.mode_choice import ModeChoice
from deepspeed_bamboo.runtime.iteration.worker import Worker


class Programs:
    """One worker's programs.

    Args:
        worker: whose they are.
        modes: in which mode iterations are planned.
        rebuilds: returns whether this worker gets a shadow beside the iteration.
        evaluated_micro_batches: returns how many micro-batches the evaluation in progress has.
    """

    def __init__(
        self,
        worker: Worker,
        *,
        modes: ModeChoice,
        rebuilds: Callable[[], bool],
        evaluated_micro_batches: Callable[[], int],
    ) -> None:
        self._worker = worker
        self._modes = modes
        self._rebuilds = rebuilds
        self._evaluated_micro_batches = evaluated_micro_batches
        self._fresh: tuple[Placement, int, Mode, Plan] | None = None

    def context(self, *, training: bool, micro_batches: int) -> IterationContext:
        """The constants of one pass over a program."""
        worker = self._worker
        return IterationContext(
            placement=worker.placement,
            activity=worker.activity.index,
            step=worker.step,
            training=training,
            micro_batches=micro_batches,
        )

    def own(self, *, training: bool) -> tuple[Instruction, ...]:
        """What this worker has to execute; one that stands by only takes part in the agreement."""
        worker = self._worker
        if worker.me not in worker.placement.holders:
            mirrors = (Instruction(Op.MIRROR),) if self._rebuilds() else ()
            return (*mirrors, Instruction(Op.COMMIT)) if training else ()
        return self._plan(training=training).program(worker.me)

    def _plan(self, *, training: bool) -> Plan:
        activity = self._worker.activity
        if activity.planned == activity.index and activity.plan is not None:
            return activity.plan
        if not training:
            return plan_inference(self._worker.placement, micro_batches=self._evaluated_micro_batches())
        return self._undisturbed()

    def _undisturbed(self) -> Plan:
        worker, mode = self._worker, self._modes.planned
        key = (worker.placement, worker.micro_batches, mode)
        if self._fresh is None or self._fresh[:3] != key:
            self._fresh = (*key, plan_iteration(worker.placement, micro_batches=worker.micro_batches, mode=mode))
        return self._fresh[3]
