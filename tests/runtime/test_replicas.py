"""A replica is what its owner is, whatever the script has done to its own stage; or the job does not start."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepspeed_bamboo.errors import ConfigError
from deepspeed_bamboo.runtime.main import EXIT_JOB_FAILED, EXIT_USER_ERROR
from deepspeed_bamboo.runtime.stock.gradients import require_state
from tests.runtime.habits import compare_habit, train_habit
from tests.runtime.jobs import Jobs


def kill(step: int, stage: int, pipeline: int = 0) -> dict[str, Any]:
    return {"step": step, "pipeline": pipeline, "stage": stage, "at": "backward", "micro_batch": 1}


CASES = [
    ("Everything", 3, [kill(1, 2), kill(3, 0)]),
    ("Objects", 3, [kill(1, 1), kill(3, 0)]),
    ("Late", 3, [kill(1, 2), kill(3, 1)]),
    ("OneModel", 3, [kill(1, 1), kill(3, 2)]),
    ("OneModel", 1, [kill(1, 0, pipeline=1)]),
    ("Moving", 3, [kill(1, 2), kill(3, 1)]),
    ("Keeping", 3, [kill(1, 1), kill(4, 2)]),
    ("Shifting", 3, [kill(2, 0), kill(4, 1)]),
]


@pytest.mark.parametrize(("habit", "stages", "faults"), CASES, ids=[f"{c[0]}-{c[1]}" for c in CASES])
def test_what_the_script_did_to_its_stage_is_there_after_losses(
    jobs: Jobs, habit: str, stages: int, faults: list[dict[str, Any]]
) -> None:
    world = 3 if stages == 3 else 2
    result = jobs.run(
        compare_habit, world=world, habit=habit, stages=stages, faults=faults, section={"debug_check_shadows": 1}
    )
    assert result.codes.count(-9) == len(faults) and result.survivors, result.transcript()
    for value in result.values.values():
        assert value["plugin"]["losses"] == value["stock"]["losses"]


def test_generators_of_layers_are_where_they_were_after_losses(jobs: Jobs) -> None:
    """Not as with stock's engine: what is an attribute of a layer itself is seeded for each forward."""
    case = {"habit": "Drawing", "stages": 3, "section": {"debug_check_shadows": 1}}
    plain = jobs.run(train_habit, world=3, faults=[], **case)
    killed = jobs.run(train_habit, world=3, faults=[kill(0, 1), kill(4, 2)], **case)
    assert killed.codes.count(-9) == 2, killed.transcript()
    assert killed.common("losses") == plain.common("losses")


@pytest.mark.parametrize(
    ("habit", "message"),
    [
        ("Unknown", "module 5, attributes has mark other tests.runtime.habits.ByIdentity with its owner and nothing"),
        ("UncallableObject", "Uncallable can't be made again"),
        ("HookedOptimizer", "weights differ after a step that owner and shadow took with the same gradients"),
        ("Pruned", "hooks has _forward_pre_hooks [['other', 'torch.nn.utils.prune.L1Unstructured']] with its owner"),
        ("Hidden", "(modules that are not registered)"),
        pytest.param(
            "Rescheduled",
            "put a ConstantLR on the engine as its",
            marks=pytest.mark.sweep,
        ),
        ("Wrapped", "weights differ after a step that owner and shadow took with the same gradients"),
    ],
)
def test_what_can_not_be_made_again_is_refused_on_all_workers_at_the_start(
    jobs: Jobs, habit: str, message: str
) -> None:
    result = jobs.run(train_habit, world=3, habit=habit, stages=3, faults=[])
    # Who hears that another has refused, before it comes to that itself, names that one.
    assert EXIT_USER_ERROR in result.codes, result.transcript()
    said = {EXIT_USER_ERROR: message, EXIT_JOB_FAILED: "the job failed on worker"}
    for code, (_, output) in zip(result.codes, sorted(result.outputs.items()), strict=True):
        assert code in said and said[code] in output, result.transcript()


def test_a_scheduler_whose_state_can_not_be_had_is_refused_with_what_it_lacks() -> None:
    class Duck:
        def step(self) -> None:
            """Does nothing."""

    with pytest.raises(ConfigError, match="scheduler Duck has no state_dict and no load_state_dict"):
        require_state(Duck())
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    require_state(torch.optim.lr_scheduler.ConstantLR(optimizer))
    require_state(None)
