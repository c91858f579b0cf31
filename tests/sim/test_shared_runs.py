"""Runs that several scenarios have in common are simulated once, and are what they would be alone."""

from __future__ import annotations

import pytest

from deepspeed_bamboo.sim.build import OWN_POLICIES, available_policies
from deepspeed_bamboo.sim.jobs import Job, build_job
from deepspeed_bamboo.sim.rivals import RivalCosts, with_rival_costs
from deepspeed_bamboo.sim.runner import run_seeds
from deepspeed_bamboo.sim.scenario import load_preset, validated
from deepspeed_bamboo.sim.shared_runs import SharedRuns
from deepspeed_bamboo.sim.traces import Trace

from .common import machines, recorded

LOSSES = [(1200.0 + 500.0 * index, "remove", f"n{3 * index}") for index in range(3)]


def table_job(costs: RivalCosts, *, precision: str = "fp32", trace: Trace | None = None) -> Job:
    data = load_preset("gpt2").model_dump(exclude_none=True)
    data["model"]["precision"] = precision
    data["run"] = {"duration_hours": 1.0}
    return build_job(with_rival_costs(validated(data, where="test"), costs), trace=trace)


def test_shared_runs_are_what_they_are_alone() -> None:
    """Rivals differ by their costs, this project by the precision, the oracle by neither: the rest is shared."""
    everyone = [(0.0, "add", f"n{index}") for index in range(24)]
    trace = recorded(machines(*everyone, *LOSSES), hours=1.0)
    shared, policies = SharedRuns(), available_policies(table_job("fair").scenario)
    rivals = [one for one in policies if one not in (*OWN_POLICIES, "oracle", "on-demand")]
    simulated = []
    for costs, precision in (("generous", "fp32"), ("fair", "fp32"), ("fair", "bf16"), ("generous", "bf16")):
        job = table_job("fair" if costs == "fair" else "generous", precision=precision, trace=trace)
        found = shared.summaries(job, machines="some", policies=policies, seeds=[1])
        assert found == run_seeds(job, policies=policies, seeds=[1])
        simulated.append(shared.simulated)
    charged = sum(one not in ("bamboo", "bamboo-published") for one in rivals)  # those two are charged the same
    assert simulated[0] == len(policies)
    assert charged <= simulated[1] - simulated[0] <= len(rivals)
    assert simulated[2] - simulated[1] == len(OWN_POLICIES)
    assert simulated[3] == simulated[2]


def test_other_machines_and_seeds_are_other_runs() -> None:
    shared, policies = SharedRuns(), ["varuna"]
    everyone = [(0.0, "add", f"n{index}") for index in range(24)]
    quiet, lossy = (recorded(machines(*everyone, *more), hours=1.0) for more in ((), LOSSES))
    [first] = shared.summaries(table_job("fair", trace=quiet), machines="quiet", policies=policies, seeds=[1])
    [other] = shared.summaries(table_job("fair", trace=lossy), machines="lossy", policies=policies, seeds=[1])
    assert first.mean("samples") > other.mean("samples")
    [seeds] = shared.summaries(table_job("fair"), machines="", policies=policies, seeds=[1, 2])
    assert seeds.runs[0] != seeds.runs[1]
    assert shared.simulated == 4


def test_what_lacks_to_the_oracle_is_accounted_for() -> None:
    """With all machines there from the start, and none lost, steps are the oracle's and what the ledger adds."""
    trace = recorded(machines(*((0.0, "add", f"n{index}") for index in range(20))), hours=2.0)
    [own, oracle] = run_seeds(table_job("fair", trace=trace), policies=["deepspeed-bamboo-off", "oracle"], seeds=[1])
    hours = own.mean("duration_hours")
    slower = sum(own.mean(f"{name}_hours") for name in ("reducing", "uneven", "bubble"))
    lacking = 1.0 - own.mean("samples") / oracle.mean("samples")
    assert lacking == pytest.approx((slower + own.mean("paused_hours") + own.mean("idle_hours")) / hours, abs=0.005)
