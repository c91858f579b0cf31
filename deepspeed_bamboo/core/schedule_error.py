"""The error of a plan that breaks a rule, with a picture of where."""

from __future__ import annotations

from collections.abc import Sequence

from deepspeed_bamboo.core.instructions import Instruction
from deepspeed_bamboo.core.placement import WorkerId
from deepspeed_bamboo.core.render import text_grid
from deepspeed_bamboo.core.schedule import Plan
from deepspeed_bamboo.core.timeline import Timed


class ScheduleError(Exception):
    """A plan breaks a rule. ``worker`` and ``instruction`` are the guilty ones, ``rule`` says what they break.

    The message draws the grid up to there, with the guilty cell marked by ``!``.
    """

    def __init__(self, rule: str, *, worker: WorkerId, instruction: Instruction | None, picture: str) -> None:
        where = "at the end of its program" if instruction is None else f"at {instruction}"
        super().__init__(f"worker {worker} {where}: {rule}\n{picture}")
        self.rule = rule
        self.worker = worker
        self.instruction = instruction


def schedule_error(
    rule: str,
    plan: Plan,
    timeline: Sequence[Timed],
    *,
    worker: WorkerId,
    instruction: Instruction | None,
) -> ScheduleError:
    """Build the error, with the picture of the last slots of the pipelines that ``worker`` works for."""
    now = max((t.end for t in timeline if t.worker == worker), default=0)
    pipelines = {c.pipeline for c in (*plan.placement.hosted_by(worker), *plan.placement.shadowed_by(worker))}
    guilty = None if instruction is None else Timed(worker, instruction, now, now + 1)
    picture = text_grid(
        timeline, placement=plan.placement, pipelines=pipelines, guilty=guilty, first_slot=max(0, now - 20)
    )
    return ScheduleError(rule, worker=worker, instruction=instruction, picture=picture)
