"""One function that checks any plan, by running it in the pure interpreter."""

from __future__ import annotations

from collections.abc import Mapping

from deepspeed_bamboo.core.debts import Debts
from deepspeed_bamboo.core.grid import Coordinate
from deepspeed_bamboo.core.instructions import TAIL
from deepspeed_bamboo.core.interpret import Execution, interpret
from deepspeed_bamboo.core.progress import CoordinateProgress
from deepspeed_bamboo.core.schedule import Plan
from deepspeed_bamboo.core.schedule_error import ScheduleError, schedule_error
from deepspeed_bamboo.core.timeline import Costs

__all__ = ["ScheduleError", "verify"]


def verify(
    plan: Plan,
    progress: Mapping[Coordinate, CoordinateProgress] | None = None,
    *,
    redundant: Mapping[Coordinate, CoordinateProgress] | None = None,
    costs: Costs | None = None,
) -> Execution:
    """Check ``plan`` from ``progress`` (default: the start of an iteration) and return its execution.

    Raises ScheduleError, naming rule, worker and instruction, unless: every worker that holds something has
    a program; every receive gets the head of its channel, nothing is left in one, and nobody waits for ever;
    every pass runs once, in micro-batch order, with its inputs there; and every program ends with the tail.
    """
    held = (*plan.placement.owners, *plan.placement.all_shadows)
    holders = {worker for c, worker in held if c.pipeline in plan.pipelines}
    programs = [worker for worker, _ in plan.programs]
    if sorted(programs) != sorted(holders):
        odd = sorted(holders.symmetric_difference(programs)) or programs
        raise schedule_error(
            "every worker that owns or shadows something has one program", plan, (), worker=odd[0], instruction=None
        )
    execution = interpret(plan, progress=progress, redundant=redundant, costs=costs)
    for worker, instruction in execution.waiting.items():
        others = (
            ", ".join(f"{w} waits at {i}" for w, i in execution.waiting.items() if w != worker) or "all others are done"
        )
        raise schedule_error(
            f"waits for ever; {others}", plan, execution.timeline, worker=worker, instruction=instruction
        )
    debts = Debts(plan, own=execution.progress, red=execution.redundant)
    for worker, program in plan.programs:
        missing = debts.of(worker)
        if plan.mode.trains and tuple(instruction.op for instruction in program[-len(TAIL) :]) != TAIL:
            missing = f"it must end with {', '.join(op.value for op in TAIL)}"
        if missing:
            raise schedule_error(missing, plan, execution.timeline, worker=worker, instruction=None)
    for source, target, receive in execution.in_flight:
        raise schedule_error(
            f"worker {target} never takes what it sent for {receive}",
            plan,
            execution.timeline,
            worker=source,
            instruction=None,
        )
    return execution
