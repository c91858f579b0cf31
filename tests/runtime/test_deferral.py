"""Passes launched before their input was seen: nothing computed from an input that never comes may be left behind."""

from __future__ import annotations

import dataclasses

import pytest

from tests.runtime.jobs import Jobs
from tests.runtime.scenarios import Training, train_and_train_late
from tests.runtime.test_losses import BF16, CLIPPED, EAGER, FP16, SPIKES, kill

# Neighbours of the lost stage wait for it, others for them: forwards, backwards, and both of one micro-batch.
LOSSES = [kill(1, 0, 1, "forward", 2), kill(2, 0, 2, "backward", 1), kill(3, 0, 0, "backward", 2)]
CHECKPOINTED = {"activation_checkpoint_interval": 1}
DEFAULT = [Training("late-buffers", 4, steps=5, layers="averaged", dropout=0.3, settings={**CLIPPED, **BF16})]
SWEEP = [
    Training("late-eager", 4, steps=5, layers="averaged", dropout=0.3, bamboo=EAGER, settings=BF16),
    Training("late-checkpointed", 4, steps=5, dropout=0.3, settings=BF16, module=CHECKPOINTED),
    Training("late-tied", 4, steps=5, layers="tied", settings={**CLIPPED, **BF16}),
    Training("late-fp32", 4, steps=5, layers="averaged", dropout=0.3, settings=CLIPPED),
    Training("late-fp16", 4, steps=5, settings={**CLIPPED, **FP16}, spikes=SPIKES),
]


@pytest.mark.parametrize(
    "training",
    [
        *(pytest.param(case, id=case.name) for case in DEFAULT),
        *(pytest.param(case, id=case.name, marks=pytest.mark.sweep) for case in SWEEP),
    ],
)
def test_nothing_computed_from_what_never_came_is_left(jobs: Jobs, training: Training) -> None:
    undisturbed = dataclasses.replace(training, name=f"{training.name}-whole", faults=[])
    killed = dataclasses.replace(training, name=f"{training.name}-killed", faults=LOSSES)
    result = jobs.run(train_and_train_late, world=4, timeout_seconds=300.0, undisturbed=undisturbed, killed=killed)
    assert result.codes.count(-9) == len(LOSSES), result.transcript()
    values = result.values[result.survivors[0]]
    for what in ("losses", "steps", "norm", "scale", "skipped", "digest"):
        assert values[killed.name][what] == values[undisturbed.name][what], what
    assert values[killed.name]["used"] > 10
    assert values[killed.name]["lost"] > 0, "no pass had to be taken back, so nothing was tested"
