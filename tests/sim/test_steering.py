"""The proactive policy of the running job, in the simulator: the same functions, never worse than the fixed one."""

from __future__ import annotations

from statistics import fmean
from typing import Any

import pytest

from deepspeed_bamboo.sim.errors import ScenarioError
from deepspeed_bamboo.sim.results import RunResult
from deepspeed_bamboo.sim.runner import run_one

from .common import machines, preset_job, recorded

SMALL: dict[str, Any] = {
    "policies__live__pipelines": 2,
    "policies__live__stages": 6,
    "policies__live__state_memory_bytes": 1e12,
    "policies__live__fatal": "in-place",
    "model__micro_batch_samples": 33,
}


def results(policy: str, *, odds: float, mode: str, precision: str, seeds: range) -> list[RunResult]:
    job = preset_job(
        "bert",
        **SMALL,
        policies__live__policy=policy,
        policies__live__redundancy=mode,
        model__precision=precision,
        market__capacity=12,
        market__removal_probability=odds,
        run__duration_hours=6.0,
    )
    return [run_one(job, policy="deepspeed-bamboo", seed=seed) for seed in seeds]


@pytest.mark.parametrize(("mode", "precision"), [("lazy", "bf16"), ("eager", "fp32")])
@pytest.mark.parametrize("odds", [0.05, 0.5])
def test_never_worse_than_fixed_by_more_than_noise(mode: str, precision: str, odds: float) -> None:
    """Over seeds: the mean of the values, to within half a per cent; and where much happens it moves less often."""
    fixed, proactive = (
        results(policy, odds=odds, mode=mode, precision=precision, seeds=range(1, 7))
        for policy in ("fixed", "proactive")
    )
    ratio = fmean(ours.value for ours in proactive) / fmean(theirs.value for theirs in fixed)
    assert ratio >= 0.995
    if odds > 0.1:
        moves = [sum(run.reconfigurations for run in runs) for runs in (fixed, proactive)]
        assert moves[1] < moves[0]
        assert ratio >= 1.0


def run_with(policy: str, *changes: tuple[float, str, str]) -> RunResult:
    """Eight machines host 2 x 6 stages, and something happens."""
    beginning = [(0.0, "add", f"n{index}") for index in range(8)]
    job = preset_job(
        "bert", trace=recorded(machines(*beginning, *changes), hours=1.0), **SMALL, policies__live__policy=policy
    )
    return run_one(job, policy="deepspeed-bamboo", seed=1)


def test_one_machine_too_many_is_not_moved_for() -> None:
    """Nine workers take as long as eight. It stands by, and when one is lost takes that one's place."""
    one = run_with("proactive", (1200.0, "add", "late"))
    assert one.reconfigurations == 1  # a stand-by is taken in within a minute
    both = run_with("proactive", (1200.0, "add", "late"), (2400.0, "remove", "n2"))
    alone = run_with("proactive", (2400.0, "remove", "n2"))
    assert both.samples > alone.samples


@pytest.mark.parametrize("plans", [True, False])
def test_in_mode_off_machines_come_in_with_a_restart_alone(plans: bool) -> None:
    """As in the engine. Six more than six are worth one; one more is not, and waits outside."""
    over = {"policies__live__plans": plans, "policies__live__redundancy": "off"}
    for added, restarts in ((6, 1), (1, 0)):
        coming = [(0.0, "add", f"n{index}") for index in range(6)]
        coming += [(1200.0, "add", f"late{index}") for index in range(added)]
        runs = [
            run_one(
                preset_job("bert", trace=recorded(machines(*changes), hours=2.0), **SMALL, **over),
                policy="deepspeed-bamboo",
                seed=1,
            )
            for changes in (coming, coming[:6])
        ]
        assert [run.reconfigurations for run in runs] == [restarts, 0]
        paused = [run.paused_hours * 3600.0 for run in runs]
        assert paused[0] - paused[1] == pytest.approx(74.0 * restarts)
        assert (runs[0].samples > runs[1].samples) == bool(restarts)


def test_the_closed_form_knows_no_policy() -> None:
    job = preset_job("bert", **SMALL, policies__live__plans=False, policies__live__policy="proactive")
    with pytest.raises(ScenarioError, match=r'policies.live.policy "proactive" is simulated by the engine.s own plans'):
        run_one(job, policy="deepspeed-bamboo", seed=1)
