"""What a script writes into the optimizer that it holds reaches every stage of its worker, and every shadow."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepspeed_bamboo.runtime.stock.hyperparameters import accept_values, carry, corresponding, values_of
from tests.runtime.habits import compare_habit
from tests.runtime.jobs import Jobs


def kill(step: int, stage: int, at: str = "backward") -> dict[str, Any]:
    return {"step": step, "pipeline": 0, "stage": stage, "at": at, **({"micro_batch": 1} if at == "backward" else {})}


def optimizer(*groups: dict[str, Any], **defaults: Any) -> torch.optim.Optimizer:
    made = [{"params": [torch.nn.Parameter(torch.zeros(2))], **group} for group in groups]
    return torch.optim.AdamW(made, **{"lr": 0.1, **defaults})


def test_values_are_those_of_the_moment_and_are_accepted_as_they_are() -> None:
    owner, shadow = (optimizer({"weight_decay": 0.1}, {"eps": 1e-6, "lr": torch.tensor(0.5)}) for _ in range(2))
    held = shadow.param_groups[1]["lr"]
    owner.param_groups[0].update(lr=0.03, betas=(0.8, 0.9), own="text")
    owner.param_groups[1]["lr"].fill_(0.25)
    values = values_of(owner)
    owner.param_groups[1]["lr"].fill_(7.0)
    accept_values(shadow, values)
    assert [group["lr"] for group in shadow.param_groups] == [0.03, torch.tensor(0.25)]
    assert shadow.param_groups[1]["lr"] is held
    assert (shadow.param_groups[0]["betas"], shadow.param_groups[0]["own"]) == ((0.8, 0.9), "text")


def test_groups_correspond_by_name_then_by_the_values_they_were_made_with_then_by_position() -> None:
    decay, none = {"weight_decay": 0.1}, {"weight_decay": 0.0}
    made = values_of(optimizer(decay, none, {"name": "head", "lr": 3.0}))
    assert corresponding(values_of(optimizer({"name": "head"}, none)), made) == (2, 1)
    assert corresponding(values_of(optimizer(none, decay, decay)), made) == (1, 0, 0)
    assert corresponding(values_of(optimizer({"eps": 1.0}, {"eps": 2.0})), made) == (0, 1)
    assert corresponding(values_of(optimizer(decay, decay)), values_of(optimizer(decay, none, decay))) == (0, 2)


def test_a_change_is_carried_to_where_the_value_was_the_same_and_told_where_it_was_another() -> None:
    script, other = optimizer({}, {"lr": 0.2}), optimizer({}, {"lr": 0.4})
    before, told = values_of(script), []
    script.param_groups[0].update(lr=0.05, betas=(0.5, 0.6))
    script.param_groups[1].update(lr=0.1)
    carry(before, values_of(script), other, (0, 1), told.append)
    assert (other.param_groups[0]["lr"], other.param_groups[0]["betas"]) == (0.05, (0.5, 0.6))
    assert other.param_groups[1]["lr"] == 0.2 and len(told) == 1 and "in proportion" in told[0]
    carry(before, values_of(script), other, (0, None), told.append)
    assert (other.param_groups[1]["lr"], len(told)) == (0.2, 1), "what was carried is not carried again"


@pytest.mark.parametrize(("habit", "stage"), [("RatesByHand", 0), ("RatesByHand", 2), ("RatesByFunction", 1)])
def test_rates_by_hand_and_a_scheduler_of_the_script_act_on_what_was_taken_over(
    jobs: Jobs, habit: str, stage: int
) -> None:
    result = jobs.run(compare_habit, world=3, habit=habit, stages=3, faults=[kill(2, stage)])
    assert result.codes.count(-9) == 1, result.transcript()
    assert all(value["plugin"]["losses"] == value["stock"]["losses"] for value in result.values.values())
    assert all(value["plugin"]["rate"] == value["stock"]["rate"] for value in result.values.values())
    assert "made anew" not in result.transcript(), "values of groups are no change of what a stage is"


@pytest.mark.sweep
@pytest.mark.parametrize("stage", [0, 1])
def test_what_an_optimizer_changes_in_its_own_step_is_each_stages_own(jobs: Jobs, stage: int) -> None:
    result = jobs.run(compare_habit, world=3, habit="EstimatedRate", stages=3, faults=[kill(2, stage)])
    assert result.codes.count(-9) == 1, result.transcript()
    assert all(value["plugin"]["losses"] == value["stock"]["losses"] for value in result.values.values())


@pytest.mark.sweep
@pytest.mark.parametrize("stage", [0, 1])
def test_layers_that_torch_compiles(jobs: Jobs, stage: int) -> None:
    result = jobs.run(compare_habit, world=3, habit="Compiled", stages=3, faults=[kill(2, stage)])
    assert result.codes.count(-9) == 1, result.transcript()
    assert all(value["plugin"]["losses"] == value["stock"]["losses"] for value in result.values.values())


@pytest.mark.sweep
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_state_that_a_script_changes_in_all_optimizers_is_as_with_stock(jobs: Jobs, stage: int) -> None:
    result = jobs.run(compare_habit, world=3, habit="MomentumByHand", stages=3, steps=7, faults=[kill(2, stage)])
    assert result.codes.count(-9) == 1, result.transcript()
    assert all(value["plugin"]["losses"] == value["stock"]["losses"] for value in result.values.values())
    assert "and not of" not in result.transcript()


@pytest.mark.sweep
def test_a_line_says_when_a_script_changes_the_state_of_one_of_its_workers_stages(jobs: Jobs) -> None:
    result = jobs.run(compare_habit, world=3, habit="MomentumOfOne", stages=3, steps=7, faults=[kill(2, 1)])
    assert result.transcript().count("the script has changed optimizer state of stage 0.") == 1, result.transcript()


COSINE = {"scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 10, "warmup_num_steps": 3}}}


@pytest.mark.sweep
@pytest.mark.parametrize("habit", ["OneRate", "TwoRates"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_rates_that_a_scheduler_changes_as_it_is_made(jobs: Jobs, habit: str, stage: int) -> None:
    """Groups of a replica are made with those of before, which its scheduler reads."""
    result = jobs.run(compare_habit, world=3, habit=habit, stages=3, steps=6, settings=COSINE, faults=[kill(2, stage)])
    assert result.codes.count(-9) == 1, result.transcript()
    assert all(value["plugin"]["losses"] == value["stock"]["losses"] for value in result.values.values())


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("habit", "faults"),
    [
        ("CountingHooks", [kill(3, 1)]),
        ("CountingHooks", [kill(2, 1), kill(3, 0)]),
        ("LateHooks", [kill(5, 1)]),
        ("WrappedForwards", [kill(2, 1), kill(4, 0)]),
        ("RootHooked", [kill(2, 1), kill(4, 0)]),
    ],
)
def test_what_hooks_keep_goes_where_their_stage_goes(jobs: Jobs, habit: str, faults: list[dict[str, Any]]) -> None:
    result = jobs.run(compare_habit, world=3, habit=habit, stages=3, steps=7, faults=faults)
    assert result.codes.count(-9) == len(faults), result.transcript()
    assert all(value["plugin"]["losses"] == value["stock"]["losses"] for value in result.values.values())


@pytest.mark.sweep
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("at", ["forward", "backward", "step"])
def test_clipping_by_hand_acts_on_what_was_taken_over(jobs: Jobs, stage: int, at: str) -> None:
    settings = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True}
    fault = {**kill(2, stage, at), **({"micro_batch": 1} if at != "step" else {})}
    result = jobs.run(compare_habit, world=3, habit="ClippingByHand", stages=3, settings=settings, faults=[fault])
    assert result.codes.count(-9) == 1, result.transcript()
    assert all(value["plugin"]["losses"] == value["stock"]["losses"] for value in result.values.values())


@pytest.mark.sweep
@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize(
    ("habit", "step", "settings"),
    [
        ("MastersByHand", 5, {"bf16": {"enabled": True}}),
        ("MastersByHand", 5, {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}),
        ("ScaleByHand", 4, {"fp16": {"enabled": True}, "zero_optimization": {"stage": 1}}),
        ("ScaleByHand", 6, {"fp16": {"enabled": True}, "zero_optimization": {"stage": 1}}),
        ("ScaleByHand", 4, {"fp16": {"enabled": True, "loss_scale": 64}}),
    ],
)
def test_masters_moments_and_scales_written_by_hand_act_on_what_was_taken_over(
    jobs: Jobs, stage: int, habit: str, step: int, settings: dict[str, Any]
) -> None:
    faults = [{**kill(step, stage, "forward"), "micro_batch": 1}]
    arguments = {"habit": habit, "stages": 3, "steps": 7, "settings": settings}
    undisturbed = jobs.run(compare_habit, world=3, faults=[], **arguments)
    result = jobs.run(compare_habit, world=3, faults=faults, **arguments)
    assert result.codes.count(-9) == 1, result.transcript()
    plain = undisturbed.values[1]["plugin"]
    assert all(value["plugin"]["losses"] == plain["losses"] for value in result.values.values())
    assert all(value["plugin"]["digest"] == plain["digest"] for value in result.values.values())


@pytest.mark.sweep
@pytest.mark.parametrize(("stage", "step"), [(0, 4), (2, 4), (0, 5), (2, 5)])
def test_what_the_script_sets_on_its_module_acts_on_what_was_taken_over(jobs: Jobs, stage: int, step: int) -> None:
    fault = {**kill(step, stage, "forward"), "micro_batch": 1}
    result = jobs.run(compare_habit, world=3, habit="OnTheModule", stages=3, steps=7, faults=[fault])
    assert result.codes.count(-9) == 1, result.transcript()
    assert all(value["plugin"]["losses"] == value["stock"]["losses"] for value in result.values.values())


@pytest.mark.sweep
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_what_an_evaluation_changes_it_changes_once(jobs: Jobs, stage: int) -> None:
    fault = {**kill(2, stage, "forward"), "micro_batch": 1}  # the first forward of that step is an evaluation's
    result = jobs.run(compare_habit, world=3, habit="Evaluating", stages=3, faults=[fault])
    assert result.codes.count(-9) == 1, result.transcript()
    assert all(value["plugin"]["losses"] == value["stock"]["losses"] for value in result.values.values())


@pytest.mark.sweep
def test_hooks_that_change_a_global_variable_are_refused_in_the_first_steps(jobs: Jobs) -> None:
    result = jobs.run(compare_habit, world=3, habit="GlobalHooks", stages=3, faults=[])
    assert result.codes == [1, 1, 1], result.transcript()
    assert result.transcript().count("the global variable NOTED of tests.runtime.habits") >= 3, result.transcript()


def test_layers_that_thaw_later_are_trained_where_they_were_taken_over(jobs: Jobs) -> None:
    result = jobs.run(compare_habit, world=3, habit="Gradual", stages=3, steps=7, faults=[kill(5, 1)])
    assert result.codes.count(-9) == 1, result.transcript()
    assert all(value["plugin"]["losses"] == value["stock"]["losses"] for value in result.values.values())
    assert "shadows are made anew before the next step" in result.transcript()


def test_a_worker_that_joins_writes_what_the_others_have_written(jobs: Jobs) -> None:
    more = {"joining": 1, "joining_after_deaths": 1, "waits": {"4": 1}, "steps": 7}
    faults = [kill(1, 1), {**kill(5, 0), "micro_batch": 2}]
    result = jobs.run(compare_habit, world=3, habit="RatesByHand", stages=3, faults=faults, **more)
    assert 3 in result.survivors and result.values[3]["plugin"]["hosted"], result.transcript()
    (rank, *_) = [rank for rank in result.survivors if rank < 3]
    expected = result.values[rank]["stock"]["losses"]
    assert result.values[rank]["plugin"]["losses"] == expected
    assert result.values[3]["plugin"]["losses"][-2:] == expected[-2:]
