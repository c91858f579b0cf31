"""What to do at an iteration boundary at which something could be changed: at once, later, or in part. Pure.

The engine (and the simulator as well) finds what it can do, and what each of it would be like: an :class:`Option`. A
policy chooses among these and nothing else, so that whatever it decides can be carried out:

- :class:`Fixed` takes the first one, which is what the engine does by itself: whoever waits is taken in, and stages
  move to the fastest placement;
- :class:`Proactive` takes the one with the most liveput (Parcae, NSDI'24): the iterations that are expected until
  machines come or go the next time, with what the change itself costs and what losses cost until then. What is foreseen
  may not come, so it waits no longer than until that has cost as much as the change (as who rents skis until he could
  have bought them): whatever comes, a change put off costs at most twice what it would have.

Both are functions of values: who decides can be anybody, and comes to the same.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from deepspeed_bamboo.core.availability import Availability
from deepspeed_bamboo.core.placement import Placement

MOST_WAIT_SECONDS = 60.0
"""Nobody waits for longer to be taken in. A script that counts its steps by itself has to catch up with those that the
job does meanwhile, and then the others wait for it."""


class Action(enum.Enum):
    """What is done."""

    MOVE = "move"
    """Whoever waits is taken in, and stages go where an iteration takes the least time."""
    STAND_BY = "stand by"
    """Whoever waits is taken in and hosts nothing; stages stay."""
    WAIT = "wait"
    """Nothing, until the next boundary."""


@dataclass(frozen=True)
class Option:
    """One of the things that can be done.

    Attributes:
        action: what.
        hosting: workers that host something then.
        iteration_seconds: of an iteration then.
        standstill_seconds: for which nobody trains, to get there.
    """

    action: Action
    hosting: int
    iteration_seconds: float
    standstill_seconds: float = 0.0


@dataclass(frozen=True)
class Standing:
    """How many workers host something, and how long an iteration takes."""

    hosting: int
    iteration_seconds: float

    @classmethod
    def of(cls, placement: Placement, iteration_seconds: float) -> Standing:
        """With this placement."""
        return cls(len({worker for _, worker in placement.owners}), iteration_seconds)


def options_at(
    now: Standing,
    then: Standing,
    *,
    stays_safe: bool,
    waited_seconds: float | None = None,
    move_seconds: float,
    stand_by_seconds: float,
) -> tuple[Option, ...]:
    """What can be done at a boundary at which the engine would move stages from ``now`` to ``then``.

    Args:
        now: if stages stay.
        then: if they move.
        stays_safe: no loss is worse if stages and shadows stay where they are; else there is no choice.
        waited_seconds: for how long somebody has waited to be taken in; None: nobody waits.
        move_seconds: for which nobody trains until stages have moved.
        stand_by_seconds: for which nobody trains until whoever waits is taken in and hosts nothing.
    """
    found = [Option(Action.MOVE, then.hosting, then.iteration_seconds, move_seconds)]
    if stays_safe and waited_seconds is not None:
        found.append(Option(Action.STAND_BY, now.hosting, now.iteration_seconds, stand_by_seconds))
    if stays_safe and (waited_seconds is None or waited_seconds < MOST_WAIT_SECONDS):
        found.append(Option(Action.WAIT, now.hosting, now.iteration_seconds))
    return tuple(found)


@dataclass(frozen=True)
class Outlook:
    """What is foreseen.

    Attributes:
        workers: all that there are, those that wait among them.
        loss_seconds: for which nobody trains after the loss of a worker that hosts something.
        availability: how often machines come and go.
        foregone: iterations that waiting has cost so far.
    """

    workers: int
    loss_seconds: float
    availability: Availability
    foregone: float = 0.0


@dataclass(frozen=True)
class Decision:
    """The option that was chosen, and one sentence that says why; none where there was no choice.

    Attributes:
        foregone_per_second: iterations that moving would have been worth more, each second of waiting.
        patience: how many of these it waits for: the iterations that moving costs.
    """

    action: Action
    reason: str = ""
    foregone_per_second: float = 0.0
    patience: float = math.inf


@dataclass(frozen=True)
class Foregone:
    """What waiting for a better moment has cost. Seconds are of any clock that only advances.

    Attributes:
        iterations: up to ``since_seconds``.
        per_second: from then on.
    """

    iterations: float = 0.0
    per_second: float = 0.0
    since_seconds: float = 0.0

    def until(self, seconds: float) -> float:
        """Iterations up to then."""
        return self.iterations + self.per_second * (seconds - self.since_seconds)

    def seconds_to(self, iterations: float) -> float:
        """From ``since_seconds`` until it has cost so many."""
        return max(0.0, iterations - self.iterations) / self.per_second if self.per_second > 0.0 else math.inf

    def after(self, decision: Decision, *, seconds: float) -> Foregone:
        """With what was decided then."""
        if decision.action is not Action.WAIT:
            return Foregone()
        return Foregone(self.until(seconds), decision.foregone_per_second, seconds)


class Policy(Protocol):
    """Chooses.

    Attributes:
        compares: False where the first option is taken whatever the others are, so that nobody has to find them.
    """

    name: ClassVar[str]
    compares: ClassVar[bool]

    def decide(self, options: Sequence[Option], outlook: Outlook) -> Decision:
        """One of ``options``, of which the first is what the engine does by itself."""


class Fixed:
    """See the module."""

    name: ClassVar[str] = "fixed"
    compares: ClassVar[bool] = False

    def decide(self, options: Sequence[Option], outlook: Outlook) -> Decision:
        """See Policy."""
        return Decision(options[0].action)


class Proactive:
    """See the module."""

    name: ClassVar[str] = "proactive"
    compares: ClassVar[bool] = True

    def decide(self, options: Sequence[Option], outlook: Outlook) -> Decision:
        """See Policy. Of options that are worth the same, the one that disturbs least."""
        by_worth = sorted(options, key=lambda one: (-liveput(one, outlook), one.standstill_seconds))
        best, move = by_worth[0], options[0]
        if len(options) == 1:
            return Decision(best.action)
        per_second, patience, why = 0.0, math.inf, ""
        if best.action is Action.WAIT:
            per_second = max(0.0, _pace(move, outlook) - _pace(best, outlook))
            patience = move.standstill_seconds / move.iteration_seconds
            if per_second > 0.0 and outlook.foregone >= patience:
                best, why = move, f"waiting has cost {outlook.foregone:.3g} iterations, as many as moving does; "
        ahead = outlook.availability.undisturbed_seconds
        worth = ", ".join(f"{one.action.value} {liveput(one, outlook):.4g}" for one in by_worth)
        return Decision(
            best.action,
            f"{best.action.value}: {why}iterations expected within {ahead:.3g} s are {worth} "
            f"({_said(options)}; {outlook.availability.said})",
            per_second,
            patience,
        )


POLICIES: dict[str, type[Fixed] | type[Proactive]] = {kind.name: kind for kind in (Fixed, Proactive)}


def liveput(option: Option, outlook: Outlook) -> float:
    """The iterations that are expected until machines come or go the next time."""
    seconds = outlook.availability.undisturbed_seconds
    training = seconds * _trains(option, outlook) - option.standstill_seconds
    return max(0.0, training) / option.iteration_seconds


def _trains(option: Option, outlook: Outlook) -> float:
    """The share of the time that losses leave for training."""
    struck = min(1.0, option.hosting / max(1, outlook.workers))
    return 1.0 - outlook.availability.losses_per_second * struck * outlook.loss_seconds


def _pace(option: Option, outlook: Outlook) -> float:
    """Iterations a second, once it is done."""
    return max(0.0, _trains(option, outlook)) / option.iteration_seconds


def _said(options: Sequence[Option]) -> str:
    return "; ".join(
        f"{one.action.value}: {one.hosting} workers host, {one.iteration_seconds:.3g} s an iteration, "
        f"{one.standstill_seconds:.2g} s to get there"
        for one in options
    )
