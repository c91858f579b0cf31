"""Rivals: each assumption is a switch, and what they do in scripted situations."""

from __future__ import annotations

import pytest

from deepspeed_bamboo.sim.build import available_policies
from deepspeed_bamboo.sim.errors import ScenarioError
from deepspeed_bamboo.sim.jobs import Job, build_job
from deepspeed_bamboo.sim.results import RunResult
from deepspeed_bamboo.sim.rivals import RIVAL_COSTS, with_rival_costs
from deepspeed_bamboo.sim.runner import run_one
from deepspeed_bamboo.sim.scenario import load_preset, validated

from .common import machines, recorded

RIVALS = ("checkpoint", "varuna", "dropping", "proactive", "oobleck-like", "checkfree-like", "recycle-like")


def job(costs: str, *changes: tuple[float, str, str], count: int = 48) -> Job:
    everyone = [(0.0, "add", f"n{index}") for index in range(count)]
    scenario = with_rival_costs(load_preset("bert"), "fair" if costs == "fair" else "generous")
    return build_job(scenario, trace=recorded(machines(*everyone, *changes), hours=2.0))


def result(policy: str, costs: str, *changes: tuple[float, str, str], count: int = 48) -> RunResult:
    return run_one(job(costs, *changes, count=count), policy=policy, seed=1)


def test_all_rivals_are_there_and_charged() -> None:
    for costs in RIVAL_COSTS:
        scenario = job(costs).scenario
        assert set(RIVALS) <= set(available_policies(scenario))
        policies = scenario.policies
        assert policies.varuna is not None and policies.recycle is not None and policies.live is not None
        fair = costs == "fair"
        restart = policies.varuna.restart_seconds + policies.varuna.restore_seconds
        assert restart == (300.0 if fair else 25.0)
        assert policies.varuna.detect_seconds == policies.recycle.detect_seconds == (3.0 if fair else 0.0)
        if fair:
            assert policies.varuna.checkpoint_seconds == policies.live.checkpoint_seconds == 600.0


@pytest.mark.parametrize("policy", RIVALS)
def test_fair_costs_are_never_less(policy: str) -> None:
    losses = [(1800.0 + 600.0 * index, "remove", f"n{5 * index}") for index in range(5)]
    assert result(policy, "fair", *losses).samples <= result(policy, "generous", *losses).samples


def test_on_demand_trains_at_the_pace_of_everybody() -> None:
    on_demand = job("generous").scenario.policies.on_demand
    spot = result("varuna", "generous", count=32)
    assert on_demand is not None
    quiet = spot.duration_hours * 3600 - 45 - 25
    slowdown = 1.0 + 1.0 / 60.0
    assert spot.samples == pytest.approx(264 * quiet / (on_demand.step_milliseconds / 1000.0 * slowdown), rel=0.01)


@pytest.mark.parametrize("policy", ["oobleck-like", "checkfree-like", "recycle-like"])
def test_one_loss_with_replicas_left_loses_no_step(policy: str) -> None:
    found = result(policy, "generous", (3600.0, "remove", "n7"))
    assert (found.fatal_losses, found.wasted_steps, found.failovers) == (0, 0, 1)


def test_the_last_replica_of_a_stage_is_what_counts() -> None:
    """One pipeline of 12 machines has no replicas: only what makes lost stages of their neighbours goes on."""
    loss = (3600.0, "remove", "n7")
    assert result("oobleck-like", "generous", loss, count=12).fatal_losses == 1
    assert result("recycle-like", "generous", loss, count=12).fatal_losses == 1
    assert result("checkfree-like", "generous", loss, count=12).fatal_losses == 0


def test_rerouting_slows_down_until_somebody_comes() -> None:
    """One of four replicas is hidden by bubbles; three are not."""
    lost = [(1200.0, "remove", f"n{index}") for index in range(3)]
    back = [(2400.0, "add", f"new{index}") for index in range(3)]
    samples = [result("recycle-like", "generous", *changes).samples for changes in ([], lost[:1], [*lost, *back], lost)]
    assert samples[0] > samples[2] > samples[3]
    assert samples[1] > 0.99 * samples[0]


def test_rivals_need_to_know_their_stages_and_keep_what_a_scenario_says_of_them() -> None:
    data = load_preset("bert").model_dump(exclude_none=True)
    own = {"least_stages": 4, "most_stages": 6}
    data["policies"] |= {"oobleck": {**own, "stall_seconds": 9.0}, "recycle": {"stages": 3}}
    policies = with_rival_costs(validated(data, where="test"), "fair").policies
    assert policies.oobleck is not None and policies.checkfree is not None and policies.recycle is not None
    found = policies.oobleck
    assert (found.least_stages, found.most_stages, found.stall_seconds) == (4, 6, 9.0)
    assert (found.reconfigure_seconds, policies.recycle.stages, policies.recycle.reroute_seconds) == (30.0, 3, 5.0)
    assert (policies.checkfree.least_stages, policies.checkfree.most_stages) == (8, 24)
    for name in ("varuna", "checkpoint"):
        del data["policies"][name]
    with pytest.raises(ScenarioError, match=r"--rivals fair: .* policies.varuna or policies.checkpoint"):
        with_rival_costs(validated(data, where="test"), "fair")
