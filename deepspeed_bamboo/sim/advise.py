"""Which fleet, grid and mode to train with, for a deadline or a budget: a choice among simulated options. Pure.

An option is simulated with many seeds. What it promises is a quantile of those runs: with a confidence of 90 %, the
hours and dollars that nine of ten runs stay within. A run that did not finish takes for ever.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .errors import ScenarioError

__all__ = ["Advice", "Goal", "Option", "Outcome", "outcome_of", "recommend"]


@dataclass(frozen=True)
class Option:
    """What could be run.

    Attributes:
        mode: `lazy`, `eager` or `off` (redundancy.mode) on spot machines, or `on-demand`.
        pipelines: of the grid.
        stages: of the grid.
        machines: wanted at any time.
    """

    mode: str
    pipelines: int
    stages: int
    machines: int

    def __str__(self) -> str:
        kind = "on-demand" if self.mode == "on-demand" else f"spot, redundancy {self.mode}"
        return f"{self.machines} machines ({kind}), grid {self.pipelines} x {self.stages}"


@dataclass(frozen=True)
class Goal:
    """What is asked for. Without a deadline and a budget: the cheapest.

    Attributes:
        deadline_hours: done by then.
        budget_dollars: for no more than that.
        confidence: the share of runs that have to keep it, above 0, at most 1.
    """

    deadline_hours: float | None = None
    budget_dollars: float | None = None
    confidence: float = 0.9

    def __post_init__(self) -> None:
        if not 0.0 < self.confidence <= 1.0:
            raise ScenarioError(f"confidence {self.confidence}: it is a share of runs, above 0 and at most 1; try 0.9")
        for name, value in (("deadline", self.deadline_hours), ("budget", self.budget_dollars)):
            if value is not None and not 0.0 < value < math.inf:
                raise ScenarioError(f"{name} {value}: it is a finite number above 0")


@dataclass(frozen=True)
class Outcome:
    """What an option promises.

    Attributes:
        option: which one.
        hours: that the asked share of runs stays within; infinite if too few finish.
        dollars: likewise.
        mean_dollars: over the runs that finish; infinite if none does.
        finished: share of runs that finish.
    """

    option: Option
    hours: float
    dollars: float
    mean_dollars: float
    finished: float


@dataclass(frozen=True)
class Advice:
    """The recommendation.

    Attributes:
        chosen: what to run; None if no option keeps the goal.
        reason: why, in one or two sentences.
        others: the next best options that keep the goal, best first; without one, the options that miss it least.
    """

    chosen: Outcome | None
    reason: str
    others: tuple[Outcome, ...]


def outcome_of(option: Option, runs: Sequence[tuple[float, float, bool]], *, confidence: float) -> Outcome:
    """What an option promises.

    Args:
        option: which one.
        runs: hours, dollars and whether it finished, one a seed; at least one.
        confidence: see Goal.
    """
    hours = sorted(one if finished else math.inf for one, _, finished in runs)
    dollars = sorted(one if finished else math.inf for _, one, finished in runs)
    paid = [one for one in dollars if math.isfinite(one)]
    return Outcome(
        option,
        _within(hours, confidence),
        _within(dollars, confidence),
        math.fsum(paid) / len(paid) if paid else math.inf,
        len(paid) / len(runs),
    )


def _within(ordered: Sequence[float], share: float) -> float:
    """The least value that at least so large a share of rising values does not exceed."""
    return ordered[max(0, math.ceil(share * len(ordered) - 1e-9) - 1)]


def recommend(outcomes: Iterable[Outcome], goal: Goal, *, shown: int = 4) -> Advice:
    """The best option that keeps the goal.

    With a deadline that is the cheapest one in time; with a budget alone the fastest one within it; with neither the
    cheapest. Equal ones: the fewer machines. Costs are those that the asked share of runs stays within.

    Raises:
        ScenarioError: there is nothing to choose from.
    """
    found = list(outcomes)
    if not found:
        raise ScenarioError("there is no option to choose from; give grids, machines and modes")
    kept = sorted((one for one in found if _shortfall(one, goal) <= 1.0), key=lambda one: _rank(one, goal))
    if not kept:
        nearest = sorted(found, key=lambda one: (_shortfall(one, goal), one.option.machines))
        return Advice(None, _nothing(nearest[0], goal), tuple(nearest[:shown]))
    return Advice(kept[0], _reason(kept, goal), tuple(kept[1 : 1 + shown]))


def _rank(outcome: Outcome, goal: Goal) -> tuple[float, float, int, str]:
    fastest_first = goal.budget_dollars is not None and goal.deadline_hours is None
    costs = (outcome.hours, outcome.dollars) if fastest_first else (outcome.dollars, outcome.hours)
    return (*costs, outcome.option.machines, str(outcome.option))


def _shortfall(outcome: Outcome, goal: Goal) -> float:
    """By how much the option misses the goal: 1 or less if it keeps it; infinite if too few runs finish."""
    if not math.isfinite(outcome.hours):
        return math.inf
    asked = ((outcome.hours, goal.deadline_hours), (outcome.dollars, goal.budget_dollars))
    return max((has / limit for has, limit in asked if limit is not None), default=0.0)


def _asked(goal: Goal) -> str:
    parts = []
    if goal.deadline_hours is not None:
        parts.append(f"done in {goal.deadline_hours:g} h")
    if goal.budget_dollars is not None:
        parts.append(f"for at most ${goal.budget_dollars:g}")
    return " ".join(parts) or "done at all"


def _reason(kept: Sequence[Outcome], goal: Goal) -> str:
    best, share = kept[0], f"{goal.confidence:.0%}"
    superlative = "fastest" if goal.budget_dollars is not None and goal.deadline_hours is None else "cheapest"
    which = f"Of the {len(kept)} options that are {_asked(goal)} in {share} of the runs it is the {superlative}"
    if len(kept) == 1:
        which = f"It is the only option that is {_asked(goal)} in {share} of the runs"
    text = f"{which}: {share} of the runs take at most {best.hours:.1f} h and ${best.dollars:.0f}."
    if len(kept) > 1:
        text += f" The next one, {kept[1].option}, takes {kept[1].hours:.1f} h and ${kept[1].dollars:.0f}."
    return text


def _nothing(nearest: Outcome, goal: Goal) -> str:
    if not math.isfinite(nearest.hours):
        return (
            f"No option finishes in {goal.confidence:.0%} of the runs; ask for more machines, a smaller grid, or a "
            "longer limit (run.limit_hours)."
        )
    return (
        f"No option is {_asked(goal)} in {goal.confidence:.0%} of the runs. The nearest, {nearest.option}, takes "
        f"{nearest.hours:.1f} h and ${nearest.dollars:.0f}; allow that, or offer more machines or other grids."
    )
