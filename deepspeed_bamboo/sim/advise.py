"""Which fleet, grid and mode to train with, for a deadline or a budget: a choice among simulated options. Pure.

An option is simulated with many seeds. What it promises is a quantile of those runs: with a confidence of 90 %, the
hours and dollars that nine of ten runs stay within. A run that did not finish takes for ever. Of so few runs that the
share is all of them, nothing else is said.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .errors import ScenarioError

__all__ = ["Advice", "Goal", "Option", "Outcome", "in_words", "outcome_of", "recommend"]


@dataclass(frozen=True)
class Option:
    """What could be run.

    Attributes:
        mode: `lazy`, `eager` or `off` (redundancy.mode) on spot machines, or `on-demand`.
        pipelines: of the grid; None where the scenario gives a step time without its grid.
        stages: likewise.
        machines: wanted at any time.
    """

    mode: str
    pipelines: int | None
    stages: int | None
    machines: int

    @property
    def grid(self) -> str:
        """Pipelines x stages, or a dash."""
        return f"{self.pipelines} x {self.stages}" if self.pipelines is not None else "-"

    def __str__(self) -> str:
        kind = "on-demand" if self.mode == "on-demand" else f"spot, redundancy {self.mode}"
        grid = f"grid {self.grid}" if self.pipelines is not None else "the grid of the scenario's step time"
        return f"{self.machines} machines ({kind}), {grid}"


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
        runs: hours and dollars of each; infinite if it does not finish.
    """

    option: Option
    hours: float
    dollars: float
    mean_dollars: float
    finished: float
    runs: tuple[tuple[float, float], ...]


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
    found = tuple((one, cost) if finished else (math.inf, math.inf) for one, cost, finished in runs)
    hours, dollars = (sorted(values) for values in zip(*found, strict=True))
    paid = [one for one in dollars if math.isfinite(one)]
    return Outcome(
        option,
        _within(hours, confidence),
        _within(dollars, confidence),
        math.fsum(paid) / len(paid) if paid else math.inf,
        len(paid) / len(runs),
        found,
    )


def _within(ordered: Sequence[float], share: float) -> float:
    """The least value that at least so large a share of rising values does not exceed."""
    return ordered[_needed(share, len(ordered)) - 1]


def _needed(share: float, count: int) -> int:
    """How many of so many runs make up a share."""
    return max(1, math.ceil(share * count - 1e-9))


def in_words(confidence: float, *, count: int) -> str:
    """Of so many runs the share that is asked for; all of them where so few can't tell it from all."""
    if _needed(confidence, count) < count:
        return f"{100 * confidence:g}% of the runs"
    return "the one run" if count == 1 else f"all {count} runs"


def recommend(outcomes: Iterable[Outcome], goal: Goal, *, shown: int = 4) -> Advice:
    """The best option that keeps the goal.

    With a deadline that is the cheapest one in time; with a budget alone the fastest one within it; with neither the
    cheapest. Equal ones: the fewer machines. Then the mode that needs the
    least. Costs are those that the asked share of runs stays within.

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


# Of equal ones first what needs the least besides: eager needs more memory than lazy, and off whole replicas.
_MODES = ("on-demand", "lazy", "off", "eager")
_ALIKE = 0.01  # of hours or dollars: less is no difference that simulated runs could tell


def _costs(outcome: Outcome, goal: Goal) -> tuple[float, float]:
    """What is to be least, and what decides between equal ones."""
    fastest_first = goal.budget_dollars is not None and goal.deadline_hours is None
    return (outcome.hours, outcome.dollars) if fastest_first else (outcome.dollars, outcome.hours)


def _rank(outcome: Outcome, goal: Goal) -> tuple[float, float, int, int, str]:
    option = outcome.option
    return (*_costs(outcome, goal), option.machines, _MODES.index(option.mode), str(option))


def _shortfall(outcome: Outcome, goal: Goal) -> float:
    """By how much the option misses the goal: 1 or less if it keeps it; infinite if too few runs finish.

    A run keeps the goal if it keeps deadline and budget, so the asked share of runs keeps both.
    """
    if not math.isfinite(outcome.hours):
        return math.inf
    limits = (goal.deadline_hours, goal.budget_dollars)
    misses = (
        max((has / limit for has, limit in zip(run, limits, strict=True) if limit is not None), default=0.0)
        for run in outcome.runs
    )
    return _within(sorted(misses), goal.confidence)


def _asked(goal: Goal) -> str:
    parts = []
    if goal.deadline_hours is not None:
        parts.append(f"done in {goal.deadline_hours:g} h")
    if goal.budget_dollars is not None:
        parts.append(f"for at most ${goal.budget_dollars:g}")
    return " ".join(parts) or "done at all"


def _share(outcome: Outcome, goal: Goal) -> str:
    return in_words(goal.confidence, count=len(outcome.runs))


def _promise(outcome: Outcome, goal: Goal) -> str:
    """What the asked share of runs stays within: hours by one share, and dollars by one that may be another."""
    share, count = _share(outcome, goal), len(outcome.runs)
    again = f"{100 * goal.confidence:g}% " if _needed(goal.confidence, count) < count else ""
    return f"{share} took at most {outcome.hours:.1f} h, and {again}cost at most ${outcome.dollars:.0f}"


def _reason(kept: Sequence[Outcome], goal: Goal) -> str:
    best, share = kept[0], _share(kept[0], goal)
    superlative = "fastest" if goal.budget_dollars is not None and goal.deadline_hours is None else "cheapest"
    which = f"Of the {len(kept)} options that are {_asked(goal)} in {share} it is the {superlative}"
    if len(kept) == 1:
        which = f"It is the only option that is {_asked(goal)} in {share}"
    text = f"{which}: {_promise(best, goal)}."
    if len(kept) > 1:
        text += f" The next one, {kept[1].option}, takes {kept[1].hours:.1f} h and ${kept[1].dollars:.0f}."
        alike = [one for one in kept[1:] if _costs(one, goal)[0] <= (1.0 + _ALIKE) * _costs(best, goal)[0]]
        if alike:
            named = "; ".join(str(one.option) for one in alike)
            text += f" Within {_ALIKE:.0%}, which such runs don't tell apart, are: {named}."
    return text


def _nothing(nearest: Outcome, goal: Goal) -> str:
    share = _share(nearest, goal)
    if not math.isfinite(nearest.hours):
        more = "ask for more machines, a smaller grid, or a longer limit (run.limit_hours)"
        return f"No option finishes in {share}; {more}."
    return (
        f"No option is {_asked(goal)} in {share}. Of the nearest, {nearest.option}, {_promise(nearest, goal)}; allow "
        "that, or offer more machines or other grids."
    )
