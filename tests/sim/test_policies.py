"""What holds for every policy, whatever happens to the machines."""

from __future__ import annotations

import json
import random
import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_bamboo.sim.build import available_policies, build_policy
from deepspeed_bamboo.sim.clock import hours
from deepspeed_bamboo.sim.engine import RunLimits, simulate
from deepspeed_bamboo.sim.jobs import Job, machine_events
from deepspeed_bamboo.sim.ledger import Ledger
from deepspeed_bamboo.sim.machines import Change, MachineEvent
from deepspeed_bamboo.sim.prices import Prices
from deepspeed_bamboo.sim.report import as_json
from deepspeed_bamboo.sim.results import RunResult
from deepspeed_bamboo.sim.runner import run_one, run_seeds
from deepspeed_bamboo.sim.scenario import load_preset

from .common import preset_job, recorded

# A small grid for this project's policy, which is planned in no time.
SMALL: dict[str, Any] = {"policies__live__pipelines": 2, "policies__live__stages": 6, "model__micro_batch_samples": 66}

SPOT = [name for name in available_policies(load_preset("bert")) if name not in ("on-demand", "oracle")]


@st.composite
def tables(draw: st.DrawFn) -> list[dict[str, float]]:
    """Step tables of 12 stages, of any shape, with 1 to 4 pipelines."""
    pipelines = draw(st.integers(1, 4))
    return [
        {"pipelines": d, "stages": 12, "milliseconds": draw(st.integers(200, 20_000))} for d in range(1, pipelines + 1)
    ]


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    """BERT's parameters with any step table, and a market of an evening."""
    return preset_job(
        "bert",
        model__table=draw(tables()),
        model__redundancy_overhead=draw(st.floats(0.0, 1.0)),
        model__precision=draw(st.sampled_from(["fp32", "bf16"])),
        # A small grid, which is planned in no time.
        model__micro_batch_samples=draw(st.sampled_from([33, 132])),
        policies__live__pipelines=draw(st.sampled_from([1, 2])),
        policies__live__stages=6,
        policies__live__fatal=draw(st.sampled_from(["restart", "in-place"])),
        market__capacity=draw(st.integers(1, 60)),
        market__removal_probability=draw(st.floats(0.0, 1.0)),
        market__addition_probability=draw(st.floats(0.0, 1.0)),
        market__notice_seconds=draw(st.sampled_from([0, 30, 120])),
        market__zones=draw(st.sampled_from([(), ("a", "b", "c")])),
        run__duration_hours=draw(st.floats(0.02, 5.0)),
    )


@given(job=jobs(), policy=st.sampled_from(SPOT), seed=st.integers(1, 1000))
@settings(max_examples=120, deadline=None)
def test_accounts_add_up(job: Job, policy: str, seed: int) -> None:
    result = run_one(job, policy=policy, seed=seed)
    batch = job.scenario.model.samples_per_step
    if policy == "dropping":
        assert result.samples <= result.steps * batch
    else:
        assert result.samples == result.steps * batch
    spent = result.useful_hours + result.redundant_hours + result.wasted_hours + result.paused_hours + result.idle_hours
    assert spent == pytest.approx(result.duration_hours)
    assert min(result.useful_hours, result.redundant_hours, result.wasted_hours) >= -1e-9
    assert result.machine_hours == pytest.approx(machine_hours(job, seed, result), abs=1e-9)
    assert result.cost_dollars == pytest.approx(result.machine_hours * 0.91)
    assert result.throughput_samples_per_second * result.duration_hours * 3600 == pytest.approx(result.samples)


def machine_hours(job: Job, seed: int, result: RunResult) -> float:
    """The integral of machines over time, from the events alone."""
    end = result.duration_hours * 3_600_000
    total, machines, since = 0.0, 0, 0.0
    for event in machine_events(job, policy="bamboo", seed=seed):
        if event.at_milliseconds > end:
            break
        total += machines * (event.at_milliseconds - since)
        since = event.at_milliseconds
        machines += (event.change is Change.ADD) - (event.change is Change.REMOVE)
    return hours(total + machines * (end - since))


@given(job=jobs(), policy=st.sampled_from(SPOT), seed=st.integers(1, 1000))
@settings(max_examples=150, deadline=None)
def test_the_oracle_is_never_beaten(job: Job, policy: str, seed: int) -> None:
    bound = run_one(job, policy="oracle", seed=seed)
    result = run_one(job, policy=policy, seed=seed)
    assert result.samples <= bound.samples
    assert result.cost_dollars == pytest.approx(bound.cost_dollars)
    assert result.value <= bound.value * (1 + 1e-9)


@given(policy=st.sampled_from(SPOT), seed=st.integers(1, 50), probability=st.floats(0.0, 0.6))
@settings(max_examples=25, deadline=None)
def test_to_completion_the_oracle_is_first(policy: str, seed: int, probability: float) -> None:
    job = preset_job(
        "bert", **SMALL, model__steps=2_000, market__removal_probability=probability, run__limit_hours=20.0
    )
    bound, result = (run_one(job, policy=name, seed=seed) for name in ("oracle", policy))
    assert bound.completed >= result.completed
    assert bound.duration_hours <= result.duration_hours
    if result.completed:
        assert result.steps == 2_000


@pytest.mark.parametrize("policy", [*SPOT, "on-demand", "oracle"])
def test_the_same_seed_gives_the_same_bytes(policy: str) -> None:
    texts = []
    for _ in range(2):
        job = preset_job("bert", **SMALL, market__removal_probability=0.3, run__duration_hours=6.0)
        texts.append(as_json(run_seeds(job, policies=[policy], seeds=[3, 4]), about={}))
    assert texts[0] == texts[1]
    assert json.loads(texts[0])["throughput_samples_per_second"]["mean"] > 0


def test_processes_make_no_difference() -> None:
    job = preset_job("bert", **SMALL, run__duration_hours=2.0)
    alone = run_seeds(job, policies=["bamboo", "varuna"], seeds=[1, 2])
    together = run_seeds(job, policies=["bamboo", "varuna"], seeds=[1, 2], processes=2)
    assert alone == together


@given(job=jobs(), policy=st.sampled_from(SPOT), seed=st.integers(1, 1000))
@settings(max_examples=60, deadline=None)
def test_steps_at_once_are_steps_one_by_one(job: Job, policy: str, seed: int) -> None:
    """The engine's jumps change nothing: price changes that change no price stop it often, and make the same run."""
    ledgers = []
    for prices in (Prices((0,), (0.91,)), Prices(tuple(range(0, 1_000_000, 7_000)), (0.91,) * 143)):
        ledger = Ledger(prices)
        running = build_policy(job, ledger, policy=policy, seed=seed)
        limits = RunLimits(job.end_milliseconds, 45_000)
        simulate(running, machine_events(job, policy=policy, seed=seed), limits=limits)
        progress = running.progress
        ledgers.append((progress.samples, progress.wasted_steps, ledger.machine_milliseconds, ledger.mode_milliseconds))
    assert ledgers[0] == ledgers[1]


@pytest.mark.parametrize("policy", ["bamboo-published", "checkpoint", "deepspeed-bamboo", "dropping", "proactive"])
def test_memory_does_not_grow_with_simulated_time(policy: str) -> None:
    peaks = []
    day = {"deepspeed-bamboo": 2.0, "proactive": 4.0}.get(policy, 12.0)
    for length in (day, day, 10 * day, 10 * day):  # the first of each also imports, and fills what is kept for ever
        job = preset_job("bert", **SMALL, run__duration_hours=length, market__removal_probability=0.3)
        tracemalloc.start()
        run_one(job, policy=policy, seed=1)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    # Ten times the time; what a planner remembers of grids and counts seen is bounded by the capacity.
    assert min(peaks[2:]) < (1.3 if policy != "proactive" else 3.0) * peaks[1] + 50_000


@pytest.mark.parametrize("policy", [*SPOT, "oracle"])
def test_no_machines_at_all(policy: str) -> None:
    job = preset_job("bert", **SMALL, market__addition_probability=0.0, run__duration_hours=3.0)
    result = run_one(job, policy=policy, seed=1)
    assert (result.samples, result.cost_dollars, result.value) == (0, 0, 0)
    assert result.idle_hours == pytest.approx(3.0)


@pytest.mark.parametrize("policy", SPOT)
def test_names_may_come_back(policy: str) -> None:
    """A machine that is gone while booting and comes back boots anew: no crash, no early start."""
    events: list[MachineEvent] = []
    generator = random.Random(5)
    live: set[str] = set()
    for second in range(0, 3600, 10):
        name = f"n{generator.randrange(40)}"
        change = Change.REMOVE if name in live else Change.ADD
        live ^= {name}
        events.append(MachineEvent(second * 1000, change, name))
    result = run_one(preset_job("bert", **SMALL, trace=recorded(events, hours=1)), policy=policy, seed=1)
    assert result.preemptions == sum(event.change is Change.REMOVE for event in events)
