"""This project's policy in scripted situations."""

from __future__ import annotations

import pytest

from deepspeed_bamboo.sim.results import RunResult
from deepspeed_bamboo.sim.runner import run_one

from .common import machines, preset_job, recorded

Changes = list[tuple[float, str, str]]
START = 45.0 + 20.0 + 30.0


def run(changes: Changes, *, hours: float = 1.0, mode: str = "lazy", pipelines: int = 2, **over: object) -> RunResult:
    job = preset_job(
        "bert",
        trace=recorded(machines(*changes), hours=hours),
        policies__live__pipelines=pipelines,
        policies__live__stages=4,
        policies__live__redundancy=mode,
        policies__live__state_memory_bytes=1e12,
        **over,
    )
    return run_one(job, policy="deepspeed-bamboo", seed=1)


def some(count: int) -> Changes:
    return [(0.0, "add", f"n{index}") for index in range(count)]


def test_undisturbed_it_pauses_only_to_start() -> None:
    result = run(some(8))
    assert result.paused_hours == pytest.approx(30 / 3600)
    assert result.idle_hours == pytest.approx(65 / 3600)
    assert result.wasted_hours == 0


def test_one_worker_is_enough() -> None:
    alone, eight = run(some(1)), run(some(8))
    assert 0 < alone.samples < eight.samples


@pytest.mark.parametrize(
    ("plans", "moving"),
    [
        (True, 0.0),  # Of seven workers one hosts two of eight stages anyway, so nothing is to be gained by a move.
        (False, 1.0 + 340e6 * 16 / 4 / 0.6e9),  # A handover and the state of a quarter of BERT.
    ],
)
def test_a_loss_costs_seconds_and_no_step(plans: bool, moving: float) -> None:
    result = run([*some(8), (1800.0, "remove", "n3")], policies__live__plans=plans)
    assert (result.failovers, result.fatal_losses, result.wasted_steps) == (1, 0, 0)
    # Detect 3 s, regroup 1 s.
    assert result.paused_hours == pytest.approx((30 + 4 + moving) / 3600, abs=2e-6)
    step_hours = 1.0 / 3600 * 20
    assert 0 < result.wasted_hours < step_hours


@pytest.mark.parametrize(("mode", "pipelines", "fatal"), [("lazy", 2, 0), ("lazy", 1, 1), ("off", 2, 0), ("off", 1, 1)])
def test_owner_and_shadow_at_once_are_recovered_from_another_pipeline(mode: str, pipelines: int, fatal: int) -> None:
    everyone = some(4 * pipelines)
    result = run([*everyone, (1800.0, "remove", "n1"), (1800.0, "remove", "n2")], mode=mode, pipelines=pipelines)
    assert result.fatal_losses == fatal


def test_without_shadows_one_pipeline_cannot_lose_anyone() -> None:
    loss = (1800.0, "remove", "n1")
    assert run([*some(4), loss], mode="off", pipelines=1).fatal_losses == 1
    assert run([*some(4), loss], mode="lazy", pipelines=1).fatal_losses == 0


def test_a_second_loss_is_covered_once_shadows_are_rebuilt() -> None:
    early = run([*some(4), (1800.0, "remove", "n1"), (1800.5, "remove", "n2")], pipelines=1)
    late = run([*some(4), (1800.0, "remove", "n1"), (1860.0, "remove", "n2")], pipelines=1)
    assert early.fatal_losses == 1
    assert late.fatal_losses == 0


def test_a_notice_moves_coordinates_before_the_deadline() -> None:
    result = run([*some(8), (1680.0, "notice", "n3"), (1800.0, "remove", "n3")])
    assert (result.failovers, result.wasted_hours) == (0, 0)
    assert result.reconfigurations == 1


def test_a_joining_machine_takes_over_live() -> None:
    before = run(some(4))
    after = run([*some(4), *((600.0, "add", f"m{index}") for index in range(4))])
    assert after.samples > 1.4 * before.samples
    assert after.reconfigurations == 1
    assert after.paused_hours < before.paused_hours + 10 / 3600


def test_losing_a_standby_costs_nothing() -> None:
    quiet = run(some(9))
    result = run([*some(9), (1800.0, "remove", "n8")])
    assert (result.samples, result.paused_hours) == (quiet.samples, quiet.paused_hours)


def test_losing_everyone_goes_back_to_the_checkpoint() -> None:
    gone = [(1800.0, "remove", f"n{index}") for index in range(8)]
    back = [(2000.0, "add", f"m{index}") for index in range(8)]
    result = run([*some(8), *gone, *back])
    assert result.fatal_losses == 1
    assert result.wasted_steps > 90  # those of ten minutes, less the start
    assert result.samples == result.steps * 264


def test_zones_make_the_loss_of_one_of_them_survivable() -> None:
    """A whole zone goes at once: fatal for one pipeline if zones are unknown, not if placement knows them."""

    def lost(known: bool) -> RunResult:
        zone = {f"n{index}": "xy"[index % 2] for index in range(8)}
        changes = [(0.0, "add", node, where if known else "-") for node, where in zone.items()]
        changes += [(1800.0, "remove", node, where if known else "-") for node, where in zone.items() if where == "x"]
        job = preset_job(
            "bert",
            trace=recorded(machines(*changes), hours=1.0),
            policies__live__pipelines=1,
            policies__live__stages=8,
        )
        return run_one(job, policy="deepspeed-bamboo", seed=1)

    assert lost(known=False).fatal_losses == 1
    assert lost(known=True).fatal_losses == 0


def test_too_few_workers_for_the_state_wait() -> None:
    # 144 coordinates with shadows, 227 MB each, in 8 GB a worker: nine workers at least.
    for count, idle_hours in ((8, 1.0), (9, 65 / 3600)):
        job = preset_job("bert", trace=recorded(machines(*some(count)), hours=1.0))
        assert run_one(job, policy="deepspeed-bamboo", seed=1).idle_hours == pytest.approx(idle_hours)
