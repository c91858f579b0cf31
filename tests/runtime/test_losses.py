"""Losing workers one after the other, until one is left: the same numbers as when nothing is lost (architecture 7)."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.runtime.jobs import Jobs
from tests.runtime.scenarios import Training, train_all

CLIPPED = {"gradient_clipping": 0.05}
BF16 = {"bf16": {"enabled": True}}
# A window of 2 raises the scale between the losses. With ZeRO the first scale overflows; without it DeepSpeed 0.19.8
# leaves a pipeline's loss unscaled (and divides by the scale all the same), so there the data have to overflow.
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 20, "loss_scale_window": 2}}
SPIKES = (1, 3)
# A small bucket: several reductions in an iteration, and no gigabyte for each of them.
ZERO = {"zero_optimization": {"stage": 1, "reduce_bucket_size": 1000}, "zero_allow_untested_optimizer": True}
CHECKED = {"debug_check_shadows": 1}
OFFLOADED = {"zero_optimization": {**ZERO["zero_optimization"], "offload_optimizer": {"device": "cpu"}}}
OWN_ADAM = {"optimizer": {"type": "AdamW", "params": {"lr": 0.01, "betas": [0.9, 0.99]}}}
OVERLAPPING = {**ZERO, "zero_optimization": {**ZERO["zero_optimization"], "overlap_comm": True}}
EAGER = {"redundancy": {"mode": "eager", "offload": "recompute"}}
FULL = {"redundancy": {"mode": "full", "offload": "recompute"}}
ACCUMULATE_FP32 = {"data_types": {"grad_accum_dtype": "fp32"}}


def kill(step: int, pipeline: int, stage: int, at: str, micro_batch: int | None = None) -> dict[str, Any]:
    where = {"step": step, "pipeline": pipeline, "stage": stage, "at": at}
    return where if micro_batch is None else {**where, "micro_batch": micro_batch}


TWO_BY_TWO = [kill(1, 1, 0, "forward", 2), kill(2, 0, 1, "backward", 1), kill(3, 0, 0, "step")]
TWO_BY_TWO_AT_THE_END = [kill(1, 1, 1, "reduce"), kill(2, 0, 1, "idle"), kill(3, 1, 0, "send_activation", 1)]
ONE_BY_FOUR = [kill(1, 0, 1, "forward", 2), kill(2, 0, 2, "send_grad", 1), kill(3, 0, 0, "step")]

DEFAULT = [
    # A stage and its shadow at once: from the other pipeline.
    (4, Training("pair-2x2", 2, settings=CLIPPED), [kill(1, 0, 0, "forward", 2), kill(1, 0, 1, "forward", 2)]),
    (
        4,
        Training("one-stage-4x1", 1, steps=5, settings=CLIPPED),
        [kill(1, 1, 0, "forward", 2), kill(2, 2, 0, "backward", 1), kill(3, 0, 0, "step")],
    ),
    # The first and the last stage's worker, which feed the pipeline.
    (
        3,
        Training("data-set-1x3", 3, steps=4, training_data=True, loader_helpers=None),
        [kill(1, 0, 2, "backward", 1), kill(2, 0, 0, "forward", 2)],
    ),
    (
        3,
        Training("few-micro-batches-1x3", 3, steps=4, micro_batches=2, dropout=0.3),
        [kill(1, 0, 1, "reduce"), kill(2, 0, 0, "step")],
    ),
    (
        4,
        Training("evaluated-dropout-2x2", 2, steps=5, dropout=0.3, evaluate_before=(0, 1, 2, 3, 4)),
        TWO_BY_TWO,
    ),
    (
        4,
        Training("buffers-1x4", 4, steps=5, layers="normalised", module={"activation_checkpoint_interval": 1}),
        ONE_BY_FOUR,
    ),
    # Graphs of several micro-batches have noted batch norm's statistics when a forward is repeated on earlier ones.
    (
        4,
        Training("recomputed-statistics-1x4", 4, steps=5, layers="normalised", bamboo={**EAGER, **CHECKED}),
        ONE_BY_FOUR,
    ),
    # The last stage, of which a shadow that keeps only inputs has done nothing, and then the first.
    (
        3,
        Training("recomputed-last-1x3", 3, steps=4, dropout=0.3, bamboo={**EAGER, **CHECKED}),
        [kill(1, 0, 2, "backward", 1), kill(2, 0, 0, "forward", 2)],
    ),
    # A last stage that is nothing but the tied head: in bf16 stock fails there, since it has no gradient to count.
    (
        3,
        Training("tied-head-alone-1x3", 3, steps=4, layers="tied", count=1, settings={**CLIPPED, **BF16}),
        [kill(1, 0, 2, "backward", 1), kill(2, 0, 0, "forward", 2)],
    ),
    # From five stages on workers of mode full have two partners that are no neighbours, whom all must meet at once.
    (5, Training("full-1x5", 5, steps=4, bamboo=FULL), [kill(1, 0, 2, "backward", 1)]),
    # Stages that tie different layers, then on one worker.
    (4, Training("tied-twice-1x4", 4, steps=5, layers="tied_twice", settings=CLIPPED), ONE_BY_FOUR),
    (4, Training("fp16-1x4", 4, steps=6, settings={**CLIPPED, **FP16}, spikes=SPIKES, bamboo=CHECKED), ONE_BY_FOUR),
    # Shadows of mode eager compute what the owner computes, with generators that no two processes have alike.
    (3, Training("drawing-1x3", 3, steps=4, layers="drawing", bamboo=EAGER), [kill(1, 0, 1, "backward", 1)]),
]
# Somebody is lost when everything is computed, and nothing agreed upon.
AGREEING_3X1 = [kill(1, 0, 0, "commit"), kill(4, 1, 0, "commit")]
AGREEING_2X2 = [kill(1, 1, 1, "commit"), kill(3, 0, 0, "commit")]
# Somebody is lost when everybody has the parameters of all parts of the optimizer, and nobody knows that of the others.
GATHERING = [kill(1, 1, 1, "gather"), kill(3, 0, 0, "gather")]
OFF = {"redundancy": {"mode": "off"}}
DEFAULT.append((4, Training("gathering-bf16-2x2", 2, steps=5, settings={**CLIPPED, **BF16}), GATHERING))
DEFAULT.append(
    (3, Training("agreeing-fp16-3x1", 1, steps=6, settings={**CLIPPED, **FP16}, spikes=SPIKES), AGREEING_3X1)
)
DEFAULT.append((4, Training("offloaded-fp16-2x2", 2, steps=5, settings={**CLIPPED, **FP16, **OFFLOADED}), TWO_BY_TWO))
SWEEP = [
    (4, Training("offloaded-2x2", 2, steps=5, settings={**CLIPPED, **OFFLOADED}, bamboo=CHECKED), GATHERING),
    (
        4,
        Training("offloaded-bf16-2x2", 2, steps=5, layers="tied", settings={**CLIPPED, **BF16, **OFFLOADED}),
        TWO_BY_TWO_AT_THE_END,
    ),
    (4, Training("offloaded-own-adam-2x2", 2, steps=6, settings={**CLIPPED, **OFFLOADED, **OWN_ADAM}), GATHERING),
    (3, Training("agreeing-offloaded-3x1", 1, steps=6, settings={**CLIPPED, **FP16, **OFFLOADED}), AGREEING_3X1),
    (4, Training("clipped-2x2", 2, steps=5, settings=CLIPPED), TWO_BY_TWO),
    (
        4,
        Training(
            "recomputed-1x4",
            4,
            steps=5,
            layers="normalised",
            module={"activation_checkpoint_interval": 1},
            bamboo={**EAGER, **CHECKED},
        ),
        ONE_BY_FOUR,
    ),
    (
        3,
        Training("agreeing-off-fp16-3x1", 1, steps=6, settings={**CLIPPED, **FP16}, spikes=SPIKES, bamboo=OFF),
        AGREEING_3X1,
    ),
    (3, Training("agreeing-bf16-3x1", 1, steps=6, settings={**CLIPPED, **BF16}), AGREEING_3X1),
    (3, Training("agreeing-zero-3x1", 1, steps=6, settings={**CLIPPED, **FP16, **ZERO}), AGREEING_3X1),
    (4, Training("gathering-zero-2x2", 2, steps=5, settings={**CLIPPED, **ZERO}, bamboo=CHECKED), GATHERING),
    (4, Training("gathering-full-2x2", 2, steps=5, settings=BF16, layers="tied", bamboo=FULL), GATHERING),
    (
        3,
        Training("gathering-3x1", 1, steps=5, settings=BF16),
        [kill(1, 1, 0, "step"), kill(2, 2, 0, "gather")],
    ),
    (4, Training("agreeing-fp16-2x2", 2, steps=6, settings={**CLIPPED, **FP16}, spikes=SPIKES), AGREEING_2X2),
    (4, Training("agreeing-bf16-2x2", 2, steps=6, settings={**CLIPPED, **BF16}), AGREEING_2X2),
    (4, Training("agreeing-zero-2x2", 2, steps=6, settings={**CLIPPED, **ZERO}, bamboo=FULL), AGREEING_2X2),
    # A stage and its shadow at once: from the other pipeline, before and after the agreement to step.
    (4, Training("pair-in-reduce-2x2", 2, settings=CLIPPED), [kill(1, 0, 0, "reduce"), kill(1, 0, 1, "reduce")]),
    (
        4,
        Training("pair-in-step-2x2", 2, settings={**CLIPPED, **FP16}, spikes=(1,)),
        [kill(1, 1, 0, "step"), kill(1, 1, 1, "step")],
    ),
    (4, Training("fp32-zero-2x2", 2, steps=5, settings={**CLIPPED, **ZERO}), TWO_BY_TWO),
    (
        4,
        Training("bf16-zero-fp32-gradients-2x2", 2, steps=5, settings={**CLIPPED, **BF16, **ZERO, **ACCUMULATE_FP32}),
        TWO_BY_TWO,
    ),
    (4, Training("fp16-2x2", 2, steps=6, settings={**CLIPPED, **FP16}, spikes=SPIKES, bamboo=CHECKED), TWO_BY_TWO),
    (4, Training("recomputed-dropout-2x2", 2, steps=5, dropout=0.3, bamboo=EAGER, settings=BF16), TWO_BY_TWO),
    (4, Training("recomputed-full-2x2", 2, steps=5, dropout=0.3, bamboo=FULL, settings={**BF16, **ZERO}), TWO_BY_TWO),
    # Compiles DeepSpeed's Adam, which takes minutes the first time.
    (
        4,
        Training(
            "fp16-compiled-2x2",
            2,
            steps=6,
            settings={**CLIPPED, **FP16, "optimizer": {"type": "Adam", "params": {"lr": 0.01}}},
            spikes=SPIKES,
            bamboo=CHECKED,
        ),
        TWO_BY_TWO,
    ),
    (2, Training("one-stage-2x1", 1, steps=4, settings={**CLIPPED, **BF16}), [kill(1, 1, 0, "reduce")]),
    (4, Training("tied-dropout-2x2", 2, steps=5, layers="tied", dropout=0.3), TWO_BY_TWO),
    (
        3,
        Training("three-pipelines-3x1", 1, steps=4, settings=BF16),
        [kill(1, 0, 0, "reduce"), kill(2, 2, 0, "step")],
    ),
    (6, Training("three-pipelines-3x2", 2, settings=CLIPPED), TWO_BY_TWO[:1]),
    (
        4,
        Training("overlapping-zero-2x2", 2, steps=5, settings={**CLIPPED, **OVERLAPPING}),
        [kill(1, 1, 1, "reduce"), kill(2, 0, 1, "commit"), kill(3, 1, 0, "step")],
    ),
    (4, Training("fp16-zero-2x2", 2, steps=5, settings={**CLIPPED, **FP16, **ZERO}), TWO_BY_TWO),
    (4, Training("tied-bf16-2x2", 2, steps=5, layers="tied", settings={**CLIPPED, **BF16}), TWO_BY_TWO_AT_THE_END),
    (
        4,
        Training("bf16-zero-2x2", 2, steps=5, layers="tied", settings={**CLIPPED, **BF16, **ZERO}),
        TWO_BY_TWO_AT_THE_END,
    ),
]


@pytest.mark.parametrize(
    ("world", "training", "faults"),
    [
        *(pytest.param(*case, id=case[1].name) for case in DEFAULT),
        *(pytest.param(*case, id=case[1].name, marks=pytest.mark.sweep) for case in SWEEP),
    ],
)
def test_same_numbers_after_losses(jobs: Jobs, world: int, training: Training, faults: list[dict[str, Any]]) -> None:
    undisturbed = dataclasses.replace(training, name=f"{training.name}-whole", faults=[])
    killed = dataclasses.replace(training, name=f"{training.name}-killed", faults=faults)
    result = jobs.run(train_all, world=world, trainings=[undisturbed, killed])
    assert result.codes.count(-9) == len(faults), result.transcript()
    assert result.codes.count(0) == world - len(faults), result.transcript()
    # What forwards do to buffers is no change by the script, for which all weights would be copied in each step.
    assert "the script" not in result.transcript(), result.transcript()
    for rank in result.survivors:
        expected, got = result.values[rank][undisturbed.name], result.values[rank][killed.name]
        for what in ("losses", "evaluations", "steps", "norm", "scale", "skipped", "digest"):
            assert got[what] == expected[what], f"{what} on rank {rank}"
        if "fp16" in training.settings:
            assert 0 < expected["skipped"] < training.steps, expected["skipped"]
            assert expected["scale"] != 2.0**20
