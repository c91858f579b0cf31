"""What came out: of one run, and of many seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, fields
from statistics import NormalDist
from typing import Literal

from .clock import MILLISECONDS_PER_HOUR, hours
from .engine import Policy
from .ledger import Mode

__all__ = ["LEAST_FOR_BANDS", "RunResult", "Summary", "interval_95", "summed_up"]


LEAST_FOR_BANDS = 20
"""Of so many runs one lies below the 5 % quantile and one above that of 95 %."""


@dataclass(frozen=True)
class RunResult:
    """One run of one policy. All per-time figures are over the chosen window.

    Attributes:
        throughput_samples_per_second: samples that count, over time.
        cost_dollars_per_hour: money over time.
        cost_dollars: all of it.
        value: throughput per $/h, by the chosen definition.
        value_ratio_of_means: throughput_samples_per_second / cost_dollars_per_hour.
        value_mean_of_ratios: the time average of throughput per $/h, step by step.
        duration_hours: the whole run.
        samples: that count at the end.
        steps: that count at the end.
        preemptions: machines taken, whatever they were doing.
        failovers: losses survived without going back.
        fatal_losses: times that a checkpoint was restored.
        back_to_memory: of them, by survivors in their processes, from each other's memory.
        back_to_store: likewise, from the store.
        reconfigurations: planned changes of placement.
        instance_lifetime_hours: mean over machines; those still there at the end count up to it.
        instances: mean number of machines.
        machine_hours: billed.
        useful_hours: running, less the three below.
        redundant_hours: running time that recomputed what others compute.
        wasted_hours: running time whose results were lost.
        paused_hours: recovering, reconfiguring, restarting, migrating.
        idle_hours: too few machines.
        reducing_hours: of the hours run, those that reducing gradients takes; like the next two 0 for policies whose
            steps come from a table, which doesn't tell.
        uneven_hours: by which the busiest worker's work is longer than all work shared evenly.
        bubble_hours: in which the busiest worker waits.
        wasted_steps: completed, then rolled back.
        dropped_samples: left out of steps.
        completed: 1 if the target of steps was reached, else 0.
        dollars_per_million_samples: all of the money over the samples that count at the end; infinite without any.
    """

    throughput_samples_per_second: float
    cost_dollars_per_hour: float
    cost_dollars: float
    value: float
    value_ratio_of_means: float
    value_mean_of_ratios: float
    duration_hours: float
    samples: float
    steps: float
    preemptions: float
    failovers: float
    fatal_losses: float
    back_to_memory: float
    back_to_store: float
    reconfigurations: float
    instance_lifetime_hours: float
    instances: float
    machine_hours: float
    useful_hours: float
    redundant_hours: float
    wasted_hours: float
    paused_hours: float
    idle_hours: float
    reducing_hours: float
    uneven_hours: float
    bubble_hours: float
    wasted_steps: float
    dropped_samples: float
    completed: float
    dollars_per_million_samples: float


def summed_up(
    policy: Policy, *, window: Literal["wall", "training"], value: Literal["ratio_of_means", "mean_of_ratios"]
) -> RunResult:
    """The result of a policy whose run is over.

    Args:
        policy: its ledger and progress are read.
        window: `wall` is all of the run. `training` is from the first step's start (money: from the run's start) to
            the last step's end, as the authors' simulator of Bamboo has it.
        value: which of the two definitions is called value.
    """
    ledger, progress = policy.ledger, policy.progress
    billed, trained, dollars, machine_hours = _over_wall_clock(policy) if window == "wall" else _over_training(policy)
    throughput = progress.samples / (trained * 3600.0) if trained else 0.0
    cost = dollars / billed if billed else 0.0
    ratios = {
        "ratio_of_means": throughput / cost if cost else 0.0,
        "mean_of_ratios": progress.ratio_hours / trained if trained else 0.0,
    }
    return RunResult(
        throughput_samples_per_second=throughput,
        cost_dollars_per_hour=cost,
        cost_dollars=ledger.dollars,
        value=ratios[value],
        value_ratio_of_means=ratios["ratio_of_means"],
        value_mean_of_ratios=ratios["mean_of_ratios"],
        duration_hours=hours(ledger.now),
        samples=float(progress.samples),
        steps=float(progress.steps),
        preemptions=float(ledger.preemptions),
        failovers=float(ledger.failovers),
        fatal_losses=float(ledger.fatal_losses),
        back_to_memory=float(ledger.back_to_memory),
        back_to_store=float(ledger.back_to_store),
        reconfigurations=float(ledger.reconfigurations),
        instance_lifetime_hours=hours(ledger.lifetimes_milliseconds()) / max(1, ledger.additions),
        instances=machine_hours / billed if billed else 0.0,
        machine_hours=hours(ledger.machine_milliseconds),
        **_hours_by_use(policy),
        wasted_steps=float(progress.wasted_steps),
        dropped_samples=float(progress.dropped_samples),
        completed=float(progress.finished),
        dollars_per_million_samples=ledger.dollars / progress.samples * 1e6 if progress.samples else math.inf,
    )


def _hours_by_use(policy: Policy) -> dict[str, float]:
    """Where the hours of a run went, by fields of RunResult."""
    ledger = policy.ledger
    running = hours(ledger.mode_milliseconds[Mode.RUNNING])
    wasted = min(running, hours(policy.progress.wasted_milliseconds))
    redundant = (running - wasted) * policy.redundancy_share
    return {
        "useful_hours": running - wasted - redundant,
        "redundant_hours": redundant,
        "wasted_hours": wasted,
        "paused_hours": hours(ledger.mode_milliseconds[Mode.PAUSED]),
        "idle_hours": hours(ledger.mode_milliseconds[Mode.IDLE]),
        "reducing_hours": ledger.reducing_milliseconds / MILLISECONDS_PER_HOUR,
        "uneven_hours": ledger.uneven_milliseconds / MILLISECONDS_PER_HOUR,
        "bubble_hours": ledger.bubble_milliseconds / MILLISECONDS_PER_HOUR,
    }


def _over_wall_clock(policy: Policy) -> tuple[float, float, float, float]:
    """Hours that are paid for, hours of training, dollars and machine hours, over all of the run."""
    ledger = policy.ledger
    return hours(ledger.now), hours(ledger.now), ledger.dollars, hours(ledger.machine_milliseconds)


def _over_training(policy: Policy) -> tuple[float, float, float, float]:
    """The same, to the end of the last step; training from the start of the first."""
    progress = policy.progress
    trained = hours(progress.last_step_at - (progress.first_start or 0))
    machine_hours = hours(progress.last_step_machine_milliseconds)
    return hours(progress.last_step_at), trained, progress.last_step_dollars, machine_hours


@dataclass(frozen=True)
class Summary:
    """One policy over its seeds.

    Attributes:
        policy: its name.
        runs: one a seed.
    """

    policy: str
    runs: tuple[RunResult, ...]

    def mean(self, name: str) -> float:
        """The mean of a field of RunResult over the seeds."""
        return math.fsum(getattr(run, name) for run in self.runs) / len(self.runs)

    def ci95(self, name: str) -> float | None:
        """Half the width of the 95 % confidence interval of that mean; None for a single seed, which tells nothing."""
        return interval_95([getattr(run, name) for run in self.runs])

    def band(self, name: str) -> tuple[float, float] | None:
        """Between which values nine of ten runs lie: the 5 % and 95 % quantiles, linear between runs; None for one."""
        values = sorted(getattr(run, name) for run in self.runs)
        return None if len(values) < 2 else (_quantile(values, 0.05), _quantile(values, 0.95))

    def spread(self, name: str) -> tuple[float, float] | None:
        """What to show of the spread: the band, or of fewer than twenty runs, too few for that, least and most."""
        values = [getattr(run, name) for run in self.runs]
        return self.band(name) if len(values) >= LEAST_FOR_BANDS or len(values) < 2 else (min(values), max(values))

    def as_json(self) -> dict[str, dict[str, float | None]]:
        """Every field of RunResult by name: mean, half its 95 % confidence interval, 5 % and 95 % quantiles.

        What is infinite or unknown is None, since JSON has no infinity.
        """
        return {field.name: self._field_as_json(field.name) for field in fields(RunResult)}

    def _field_as_json(self, name: str) -> dict[str, float | None]:
        low, high = self.band(name) or (None, None)
        found = {"mean": self.mean(name), "ci95": self.ci95(name), "p5": low, "p95": high}
        return {key: value if value is not None and math.isfinite(value) else None for key, value in found.items()}


def _quantile(ordered: Sequence[float], share: float) -> float:
    """The value below which a share (0 to 1) of some rising values lies, linear between two of them."""
    at = share * (len(ordered) - 1)
    below = math.floor(at)
    above = min(below + 1, len(ordered) - 1)
    if at == below or ordered[below] == ordered[above]:  # infinity times nothing is no number
        return ordered[below]
    return ordered[below] + (ordered[above] - ordered[below]) * (at - below)


def interval_95(values: Sequence[float]) -> float | None:
    """Half the width of the mean's 95 % confidence interval by Student's t; None for fewer than two values."""
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return None
    return _student_975(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))


def _student_975(freedom: int) -> float:
    """The 97.5 % quantile of Student's t: exact for 1 and 2, else by the expansion of Cornish and Fisher (to 0.1 %)."""
    if freedom == 1:
        return math.tan(math.pi * 0.475)
    if freedom == 2:
        return 0.95 * math.sqrt(2.0 / (1.0 - 0.95**2))
    z = NormalDist().inv_cdf(0.975)
    terms = (
        z,
        (z**3 + z) / (4 * freedom),
        (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2),
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3),
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * freedom**4),
    )
    return math.fsum(terms)
