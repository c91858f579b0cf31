"""Runs a policy, or many policies with many seeds."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from .build import build_policy
from .clock import to_milliseconds
from .engine import RunLimits, simulate
from .jobs import Job, machine_events
from .ledger import Ledger, RunSeries
from .prices import constant_price
from .results import RunResult, Summary, summed_up

__all__ = ["run_one", "run_seeds"]

# Runs handed to a process at once: enough to make handing over cheap, few enough to keep all busy.
_CHUNK = 8


def run_one(
    job: Job,
    *,
    policy: str,
    seed: int,
    series: RunSeries | None = None,
    report: Callable[[int, int], None] | None = None,
) -> RunResult:
    """One run of one policy.

    Args:
        job: what to run.
        policy: one of available_policies.
        seed: of the market, and of what a policy samples.
        series: filled with the run over time, if given.
        report: called now and then with simulated milliseconds and steps.

    Raises:
        SimulationError: the policy is unknown, or needs a step time that there isn't.
    """
    prices = job.prices
    if policy == "on-demand" and job.scenario.policies.on_demand is not None:
        prices = constant_price(job.scenario.policies.on_demand.dollars_per_hour)
    ledger = Ledger(prices, series=series)
    running = build_policy(job, ledger, policy=policy, seed=seed)
    limits = RunLimits(job.end_milliseconds, to_milliseconds(job.scenario.market.boot_seconds))
    simulate(running, machine_events(job, policy=policy, seed=seed), limits=limits, report=report)
    return summed_up(running, window=job.scenario.run.window, value=job.scenario.run.value)


def run_seeds(
    job: Job,
    *,
    policies: Sequence[str],
    seeds: Sequence[int],
    processes: int = 1,
    report: Callable[[int], None] | None = None,
) -> list[Summary]:
    """Every policy with every seed.

    Args:
        job: what to run.
        policies: some of available_policies.
        seeds: of the runs.
        processes: how many work at once; the results don't depend on it.
        report: called with the number of runs done so far.

    Returns:
        A summary a policy, in the order given.
    """
    tasks = [(policy, seed) for policy in policies for seed in seeds]
    results: list[RunResult] = []
    for result in _in_order(partial(_run_task, job), tasks, processes):
        results.append(result)
        if report is not None:
            report(len(results))
    count = len(seeds)
    return [
        Summary(policy, tuple(results[index * count : (index + 1) * count])) for index, policy in enumerate(policies)
    ]


def _run_task(job: Job, task: tuple[str, int]) -> RunResult:
    policy, seed = task
    return run_one(job, policy=policy, seed=seed)


def _in_order(
    work: Callable[[tuple[str, int]], RunResult], tasks: list[tuple[str, int]], processes: int
) -> Iterator[RunResult]:
    """The results in the order of the tasks, whoever computes them."""
    if processes <= 1 or len(tasks) <= 1:
        yield from map(work, tasks)
        return
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        yield from pool.imap(work, tasks, chunksize=_CHUNK)
