"""A scenario made ready to run: files read, step times built, the machines' events."""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ..text_files import UnreadableError, json_of, text_of
from .bulk import BulkLosses, with_bulk_losses
from .clock import MILLISECONDS_PER_HOUR, MILLISECONDS_PER_SECOND, to_milliseconds
from .cost import JobProfile, ProfileError, profile_from_json, redundant_forward_overhead
from .errors import ScenarioError
from .machines import Change, MachineEvent
from .market import HourlyMarket, hourly_events
from .measured import is_measured, measured_profile
from .prices import Prices, ZonedPrices, constant_price, read_prices
from .scenario import Scenario
from .steptimes import Grid, ProfiledSteps, StepTable, StepTimes, WithoutRedundancy
from .traces import Trace, capped

__all__ = ["Job", "build_job", "heap_ordered", "machine_events"]


@dataclass(frozen=True)
class Job:
    """A scenario made ready to run: files read, step times built.

    Attributes:
        scenario: as given.
        steps: step times with eager FRC.
        overhead: of eager FRC.
        prices: of a spot machine.
        trace: instead of the market's odds; capped at the market's capacity.
        profile: what `steps` are made of, if they are not of a table.
        of_a_job: whether `profile` is what a job has measured of itself.
    """

    scenario: Scenario
    steps: StepTimes
    overhead: float
    prices: Prices | ZonedPrices
    trace: Trace | None = None
    profile: JobProfile | None = None
    of_a_job: bool = False

    @cached_property
    def plain_steps(self) -> StepTimes:
        """Step times without redundancy."""
        return WithoutRedundancy(self.steps, self.overhead)

    @property
    def redundancy_share(self) -> float:
        """The part of running time that eager FRC takes."""
        return self.overhead / (1.0 + self.overhead)

    @property
    def end_milliseconds(self) -> int:
        """When a run ends at the latest."""
        run = self.scenario.run
        if run.duration_hours is not None:
            return round(run.duration_hours * MILLISECONDS_PER_HOUR)
        if self.trace is not None:
            return self.trace.duration_milliseconds
        return round(run.limit_hours * MILLISECONDS_PER_HOUR)


def build_job(scenario: Scenario, *, trace: Trace | None = None, folder: Path | None = None) -> Job:
    """Make a scenario ready.

    Args:
        scenario: what to run.
        trace: machines as recorded, instead of the market's odds.
        folder: where the scenario's relative paths begin.

    Raises:
        SimulationError: a file that the scenario names is missing or wrong, or it has no end.
    """
    model, market, run = scenario.model, scenario.market, scenario.run
    base = folder or Path()
    if trace is None and model.steps is None and run.duration_hours is None:
        raise ScenarioError(
            f"{model.name} has no number of steps and run.duration_hours is not given: a run needs an end; give one"
        )
    if trace is not None and not trace.duration_milliseconds and run.duration_hours is None:
        raise ScenarioError(
            "the trace ends at its first instant, so a run has no end; add later lines to it, or give --duration-hours"
        )
    if trace is not None:
        # A notice only matters if the market gives one: a recorded one is kept as it stands.
        events = tuple(capped(_with_notices(trace.events, market.notice_seconds), capacity=market.capacity))
        trace = replace(trace, events=events)
    prices = (
        read_prices(base / market.price_history) if market.price_history else constant_price(market.dollars_per_hour)
    )
    if trace is not None:
        prices = prices.since(trace.begins_at_milliseconds)
    if isinstance(prices, ZonedPrices):
        prices.check({event.zone for event in trace.events} if trace is not None else market.zones or ("",))
    if model.profile is not None:
        profile, of_a_job = _read_profile(base / model.profile)
        steps: StepTimes = ProfiledSteps(profile, model.samples_per_step, model.most_pipelines)
        return Job(scenario, steps, redundant_forward_overhead(profile), prices, trace, profile, of_a_job)
    rows = {Grid(row.pipelines, row.stages): row.milliseconds / MILLISECONDS_PER_SECOND for row in model.table}
    return Job(scenario, StepTable(model.name, rows, model.layers), model.redundancy_overhead, prices, trace)


def _read_profile(path: Path) -> tuple[JobProfile, bool]:
    """The profile, and whether a job has measured it of itself."""
    try:
        text = text_of(path)
        data = _parsed(text)
        if is_measured(data):
            return measured_profile(data, name=path.name), True
        return profile_from_json(text), False
    except UnreadableError as error:
        raise ScenarioError(f"{path}: {error}; give the path of a profile") from error
    except ProfileError as error:
        raise ScenarioError(f"{path}: {error}") from error


def _parsed(text: str) -> Any:
    try:
        return json_of(text)
    except UnreadableError:
        return None  # profile_from_json says what is wrong


def _with_notices(events: Sequence[MachineEvent], notice_seconds: int) -> list[MachineEvent]:
    """Warn every machine that the trace doesn't warn, so long before it goes, or when it comes."""
    if not notice_seconds or any(event.change is Change.NOTICE for event in events):
        return list(events)
    added: dict[str, int] = {}
    notices = []
    for event in events:
        if event.change is Change.ADD:
            added[event.node] = event.at_milliseconds
        else:
            at = max(added[event.node], event.at_milliseconds - notice_seconds * MILLISECONDS_PER_SECOND)
            notices.append(MachineEvent(at, Change.NOTICE, event.node, event.zone))
    return sorted([*events, *notices], key=lambda event: (event.at_milliseconds, event.change))


def machine_events(job: Job, *, policy: str, seed: int) -> Iterator[MachineEvent]:
    """What happens to the machines of a run: the same for every policy on spot machines, on the same seed."""
    on_demand = job.scenario.policies.on_demand
    if policy == "on-demand" and on_demand is not None:
        return iter([MachineEvent(0, Change.ADD, f"node{index + 1}") for index in range(on_demand.machines)])
    events, market = _without_bulk_losses(job, policy=policy, seed=seed), job.scenario.market
    if market.bulk_minutes is None:
        return events
    every, back = (to_milliseconds(60.0 * minutes) for minutes in (market.bulk_minutes, market.bulk_return_minutes))
    # A generator of its own: what else happens is the same with and without.
    drawn = random.Random(f"bulk {seed}")
    return with_bulk_losses(events, BulkLosses(every, back), generator=drawn, end_milliseconds=job.end_milliseconds)


def _without_bulk_losses(job: Job, *, policy: str, seed: int) -> Iterator[MachineEvent]:
    bamboo = job.scenario.policies.bamboo
    if job.trace is not None:
        if policy == "bamboo-published" and bamboo is not None and bamboo.oddities.heap_order:
            return iter(heap_ordered(job.trace.events))
        return iter(job.trace.events)
    spec = job.scenario.market
    market = HourlyMarket(
        capacity=spec.capacity,
        removal_probabilities=_by_hour(spec.removal_probability),
        addition_probabilities=(
            None if isinstance(spec.addition_probability, str) else _by_hour(spec.addition_probability)
        ),
        start_hour=spec.start_hour,
        notice_seconds=spec.notice_seconds,
        zones=spec.zones,
        zone_removal_probability=spec.zone_removal_probability,
    )
    return hourly_events(market, generator=random.Random(seed), end_milliseconds=job.end_milliseconds)


def _by_hour(probability: float | tuple[float, ...]) -> tuple[float, ...]:
    return probability if isinstance(probability, tuple) else (probability,) * 24


def heap_ordered(events: Sequence[MachineEvent]) -> list[MachineEvent]:
    """The events by time and kind; equal ones as a binary heap yields them that got them in the file's order."""
    heap: list[_Tied] = []
    for event in events:
        heapq.heappush(heap, _Tied(event))
    return [heapq.heappop(heap).event for _ in range(len(heap))]


class _Tied:
    """An event that is equal to all others of its instant and kind."""

    __slots__ = ("event", "key")

    def __init__(self, event: MachineEvent) -> None:
        self.event = event
        self.key = (event.at_milliseconds, event.change)

    def __lt__(self, other: _Tied) -> bool:
        return self.key < other.key
