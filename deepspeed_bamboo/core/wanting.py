"""How many machines a fleet should keep for a job: as many as make it faster, those that are missing counted. Pure.

Parcae (NSDI'24) keeps as many stand-bys as it expects to lose. Here that follows from the number of machines that are
there on average: of a fleet of so many each is missing for a share of the time, from its loss to its replacement's
first step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from deepspeed_bamboo.core.reconfiguring import LEAST_GAIN

__all__ = ["Wanted", "missing_share", "modest", "wanted_machines"]

_DEVIATIONS = 8.0  # of how many machines are there, beyond which nothing counts
_MOST_MISSING = 0.99


@dataclass(frozen=True)
class Wanted:
    """How many machines, and of these how many are there for those that are missing; and why, in a sentence."""

    machines: int
    spare: int
    reason: str


def missing_share(*, losses_per_machine_hour: float, boot_seconds: float) -> float:
    """The share of the time for which a machine is missing, 0 to 0.99, if a lost one is replaced in ``boot_seconds``.

    That of a machine which is there for an hour over its losses on average, and then gone for so long.
    """
    gone = losses_per_machine_hour / 3600.0 * boot_seconds
    return gone / (1.0 + gone) if gone < _MOST_MISSING / (1.0 - _MOST_MISSING) else _MOST_MISSING


def wanted_machines(
    seconds_of: Callable[[int], float], *, most: int, missing: float, least: int = 1, why_least: str = ""
) -> Wanted:
    """The least number of machines with which the job is as fast as it can be, but for what no stage would move for.

    Args:
        seconds_of: of an iteration with so many machines, from 1 on. More machines need not all be used.
        most: machines that may be asked for.
        missing: the share of the time for which a machine is not there.
        least: machines that are wanted in any case, as far as ``most`` allows.
        why_least: for people, where fewer would be as fast.

    Raises:
        ValueError: ``most`` is below 1, or ``missing`` no share below 1.
    """
    if most < 1 or not 0.0 <= missing < 1.0:
        raise ValueError(f"{most} machines, missing for {missing} of the time; at least 1, and a share below 1")
    paces = [0.0]
    for machines in range(1, most + 1):
        paces.append(max(paces[-1], 1.0 / seconds_of(machines)))
    expected = [_expected(paces, machines, missing=missing) for machines in range(most + 1)]
    enough = (1.0 - LEAST_GAIN) * max(expected)
    enough_for_speed = next(number for number in range(1, most + 1) if expected[number] >= enough)
    machines = min(most, max(least, enough_for_speed))
    fast = next(number for number in range(1, most + 1) if paces[number] >= (1.0 - LEAST_GAIN) * paces[machines])
    used = max(fast, min(most, least))
    spare = machines - used
    gain = expected[most] / expected[machines] - 1.0
    reason = f"{used} machines are of use"
    if fast < used and why_least:
        reason = f"{used} machines {why_least} ({fast} would be as fast)"
    if spare:
        reason += f", and {spare} more for those that are missing, each for {missing:.1%} of the time"
    if machines < most:
        reason += f"; all {most} would be {max(0.0, gain):.1%} faster"
    return Wanted(machines, spare, reason)


def modest(wish: Wanted, *, asked: int) -> Wanted:
    """``wish``, with at most one machine above both what is ``asked`` for now and what is of use without losses.

    Losses come in clusters, and a machine that was asked for once runs on when they are over.
    """
    most = max(asked, wish.machines - wish.spare) + 1
    if wish.machines <= most:
        return wish
    spare = wish.spare - (wish.machines - most)
    return replace(wish, machines=most, spare=spare, reason=f"{wish.reason}; one more at each look")


def _expected(paces: list[float], machines: int, *, missing: float) -> float:
    """Iterations a second on average, of the number that is there (binomial)."""
    if missing == 0.0 or machines == 0:
        return paces[machines]
    mean, deviation = machines * (1.0 - missing), math.sqrt(machines * missing * (1.0 - missing))
    first = max(0, math.floor(mean - _DEVIATIONS * deviation))
    there, away = math.log1p(-missing), math.log(missing)
    total = 0.0
    for count in range(first, machines + 1):
        ways = math.lgamma(machines + 1) - math.lgamma(count + 1) - math.lgamma(machines - count + 1)
        total += paces[count] * math.exp(ways + count * there + (machines - count) * away)
    return total
