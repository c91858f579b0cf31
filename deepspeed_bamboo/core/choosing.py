"""``redundancy.mode: "auto"``: lazy or eager, whichever loses less time, and why. Pure.

Eager costs a little in every iteration, lazy a little more after every loss: it has to repeat the lost forwards. So
eager is the better one only where losses come often enough for what it costs. What has not been measured yet is
predicted from the schedule: how much longer the plan with redundant forwards is, and how many forwards a loss in the
middle of an iteration takes along.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from deepspeed_bamboo.core.interpret import interpret
from deepspeed_bamboo.core.placement import Placement
from deepspeed_bamboo.core.planning import bubble_fit, plan_iteration
from deepspeed_bamboo.core.schedule import Mode
from deepspeed_bamboo.core.timeline import Costs, length

_SECONDS_PER_HOUR = 3600.0
# So much better the other mode has to be before the current one is given up.
MARGIN = 1.2


@dataclass(frozen=True)
class Figures:
    """What the choice depends on. Raises ValueError for a negative or infinite figure, or iterations of no time.

    Attributes:
        iteration_seconds: an undisturbed iteration in mode lazy.
        eager_overhead_seconds: how much longer it takes in mode eager.
        losses_per_hour: of workers, in the whole job.
        saved_seconds_per_loss: how much less time eager spends on repeating what was lost.
    """

    iteration_seconds: float
    eager_overhead_seconds: float
    losses_per_hour: float
    saved_seconds_per_loss: float

    def __post_init__(self) -> None:
        values = vars(self)
        wrong = [f"{name} is {value}" for name, value in values.items() if not 0 <= value < math.inf]
        if wrong or not self.iteration_seconds:
            raise ValueError(f"{', '.join(wrong) or 'iteration_seconds is 0'}; a figure is a finite number from 0 up")

    @property
    def cost_of_eager(self) -> float:
        """Seconds that eager costs in an hour."""
        iterations = _SECONDS_PER_HOUR / (self.iteration_seconds + self.eager_overhead_seconds)
        return self.eager_overhead_seconds * iterations

    @property
    def cost_of_lazy(self) -> float:
        """Seconds that lazy costs in an hour."""
        return self.losses_per_hour * self.saved_seconds_per_loss


@dataclass(frozen=True)
class Choice:
    """A mode, and one sentence that says why."""

    mode: Mode
    reason: str


@dataclass(frozen=True)
class Prediction:
    """What the schedule says before anything was measured, as shares of an iteration in mode lazy."""

    eager_overhead: float
    saved_per_loss: float


def choose(figures: Figures, *, current: Mode = Mode.LAZY, notes: str = "") -> Choice:
    """Lazy or eager for ``figures``; ``current`` stays unless the other one is better by MARGIN.

    ``notes`` goes into the reason: where the figures come from.
    """
    lazy, eager = figures.cost_of_lazy, figures.cost_of_eager
    if current is Mode.EAGER:
        mode = Mode.LAZY if lazy * MARGIN < eager or lazy == 0 else Mode.EAGER
    else:
        mode = Mode.EAGER if eager * MARGIN < lazy else Mode.LAZY
    text = (
        f"{mode.value}: redundant forwards would cost {eager:.3g} s of each hour "
        f"({1000 * figures.eager_overhead_seconds:.3g} ms of each iteration of "
        f"{1000 * figures.iteration_seconds:.4g} ms) and save {lazy:.3g} s "
        f"({figures.losses_per_hour:.3g} losses an hour, {1000 * figures.saved_seconds_per_loss:.3g} ms of "
        "repeated forwards each)"
    )
    return Choice(mode, f"{text}; {notes}" if notes else text)


def predict(
    placement: Placement, *, micro_batches: int, costs: Costs | None = None, eager: Mode = Mode.EAGER
) -> Prediction:
    """What the plans of both modes say. A loss is taken to come in the middle of an iteration's forwards.

    ``eager`` is how eager is planned. With EAGER_RECOMPUTE each backward after a loss repeats its forward.
    """
    slots = costs or Costs()
    lazy_slots, eager_slots = (
        length(
            interpret(
                plan_iteration(placement, micro_batches=micro_batches, mode=mode, costs=slots), costs=slots
            ).timeline
        )
        for mode in (Mode.LAZY, eager)
    )
    fits = bubble_fit(placement, micro_batches=micro_batches, mode=eager, costs=slots)
    share = sum(fit.forwards for fit in fits) / (micro_batches * len(placement.shadows)) if placement.shadows else 0.0
    saved = 0.0 if eager is Mode.EAGER_RECOMPUTE else share * micro_batches / 2 * slots.forward
    return Prediction(
        eager_overhead=max(0, eager_slots - lazy_slots) / lazy_slots,
        saved_per_loss=saved / lazy_slots,
    )


def loss_rate(losses: int, *, seconds: float, expected_per_hour: float | None = None) -> float:
    """Losses per hour after ``losses`` in the last ``seconds``.

    ``expected_per_hour``: what is known without having measured; it counts as much as one hour of measuring.
    """
    hours = seconds / _SECONDS_PER_HOUR
    if expected_per_hour is not None:
        return (losses + expected_per_hour) / (hours + 1.0)
    return losses / hours if losses and hours > 0 else 0.0


def middle(values: Sequence[float]) -> float | None:
    """The median, or None of nothing."""
    ordered = sorted(values)
    return ordered[len(ordered) // 2] if ordered else None
