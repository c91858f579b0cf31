"""The end of an iteration: reduce, mirror to the shadows, agree, step (architecture 5, commit rule).

Before the agreement everything can be undone: gradients are put back to what they were before the
reduction. After it every worker steps, whatever happens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from deepspeed_bamboo.core.contributions import merged
from deepspeed_bamboo.core.instructions import Instruction, Op
from deepspeed_bamboo.runtime.iteration.activity import Round
from deepspeed_bamboo.runtime.iteration.messages import IterationContext
from deepspeed_bamboo.runtime.iteration.mirroring import Mirroring, ShadowsToCome
from deepspeed_bamboo.runtime.iteration.reduction import Reduction
from deepspeed_bamboo.runtime.iteration.step_calls import StepCalls
from deepspeed_bamboo.runtime.iteration.worker import Worker
from deepspeed_bamboo.runtime.stock.running_calls import RunningCalls
from deepspeed_bamboo.runtime.stock.shadow_steps import ShadowSteps
from deepspeed_bamboo.runtime.stock.stock_steps import StockSteps, apply_buffers


class Rebuilt(ShadowsToCome, Protocol):
    """As the end of an iteration knows the rebuilding of shadows."""

    def prepare(self) -> None:
        """When this worker's passes are done: get ready for gradients. Raises what interrupts that."""


class Writes(Protocol):
    """What the script writes into its optimizer."""

    def follow(self) -> None:
        """Bring it to all stages of this worker."""

    def stepped(self) -> None:
        """The steps are taken."""


@dataclass(frozen=True)
class Contributors:
    """What travels with the agreement of an iteration besides what the steps need.

    ``prepare`` is called before this worker's value is made. ``first`` may be asked before the agreement is due,
    ``last`` when it is. ``counts`` is called with everybody's values before the steps. ``rebuilt`` are the shadows to
    come.
    """

    prepare: Callable[[], None]
    first: Callable[[], dict[str, Any]]
    last: Callable[[], dict[str, Any]]
    counts: Callable[[Round], None]
    rebuilt: Callable[[], Rebuilt]


class IterationEnd:
    """Carries out the instructions that a worker has once an iteration, for all that it hosts and shadows.

    Args:
        worker: whose.
        stock: reduces, reads and writes gradients, takes steps.
        running: knows which stock code is running.
        writes: what the script writes into its optimizer.
        contributors: what else is agreed upon.
    """

    def __init__(
        self,
        worker: Worker,
        *,
        stock: StockSteps,
        running: RunningCalls,
        writes: Writes,
        contributors: Contributors,
    ) -> None:
        self._worker = worker
        self._writes = writes
        self._contributors = contributors
        self._shadow_steps = ShadowSteps(worker.device)
        self._reduction = Reduction(worker, stock=stock, running=running)
        self._steps = StepCalls(worker, stock=stock, running=running, shadow_steps=self._shadow_steps)
        self._mirroring = Mirroring(
            worker,
            stock=stock,
            steps=self._steps,
            shadow_steps=self._shadow_steps,
            to_come=contributors.rebuilt,
        )
        # This worker's value for the agreement, if it is known already.
        self._value: dict[str, Any] | None = None

    def execute(self, instruction: Instruction, context: IterationContext) -> None:
        """Carry out one of REDUCE_TIED, REDUCE, MIRROR, COMMIT. Raises what interrupts a wait."""
        self._contributors.rebuilt().prepare()
        if instruction.op is Op.REDUCE_TIED:
            self._reduction.reduce_tied(context)
        elif instruction.op is Op.REDUCE:
            self._reduction.reduce(context)
        elif instruction.op is Op.MIRROR:
            self._cancel()
            self._writes.follow()
            self._mirroring.mirror(context, meanwhile=self._keep_value)
        elif instruction.op is Op.COMMIT:
            self._commit()
        else:
            raise ValueError(f"{instruction} does not belong to the end of an iteration")

    def step(self, context: IterationContext) -> None:
        """After the agreement: every replica takes its step. Continues where an interruption stopped it."""
        worker, activity = self._worker, self._worker.activity
        self._contributors.counts(activity.rounds[0])
        self._steps.forget_others()
        if activity.delivered == 0:
            for replica in worker.host.owners():
                worker.strike_if_scripted(replica.coordinate, "step")
        self._mirroring.accept_arrived()
        self._steps.take(micro_batches=context.micro_batches)
        for replica in worker.host.replicas():
            apply_buffers(replica)
        self._writes.stepped()

    def launch_late_steps(self) -> None:
        """See :meth:`StepCalls.launch_late`."""
        self._steps.launch_late()

    def abandon(self) -> None:
        """Nobody saw the agreement: back to the gradients before the reduction, as if nothing was suspended."""
        self._cancel()
        self._reduction.undo()

    def forget(self) -> None:
        """The iteration is over: drop what was kept for undoing it."""
        self._worker.links.drain()
        for replica in self._worker.host.replicas():
            replica.start_iteration()
            self._worker.host.empty_buffers(replica)

    def _cancel(self) -> None:
        self._value = None
        self._mirroring.forget()
        self._steps.cancel()

    def _keep_value(self) -> None:
        self._value = self._own_value()

    def _own_value(self) -> dict[str, Any]:
        """This worker's value for the agreement."""
        self._contributors.prepare()
        return merged({"contributions": self._steps.contributions()}, self._contributors.first())

    def _commit(self) -> None:
        worker = self._worker
        value, self._value = self._value or self._own_value(), None
        value = merged(value, self._contributors.last())
        for replica in worker.host.owners():
            worker.strike_if_scripted(replica.coordinate, "commit")
        if self._shadow_steps.active:
            worker.activity.rounds.append(worker.agree(value, meanwhile=self._prepare_step))
        else:
            self._prepare_step()
            worker.activity.rounds.append(worker.agree(value))

    def _prepare_step(self) -> None:
        """What is left to do here before the step, while this worker waits for the others' agreement."""
        self._mirroring.accept_arrived()
        self._steps.start_in_time(self._worker.host.shadows.keys())
