"""The published evaluation's models lose every stage, and workers join: weights, statistics and losses are equal."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deepspeed_bamboo.models.batches import BatchShape, StepBatches
from deepspeed_bamboo.models.catalog import DataPaths, model_named
from deepspeed_bamboo.models.costs import layer_costs
from deepspeed_bamboo.models.partition import BalancedPipeline
from tests.models.whole import little_data
from tests.runtime.jobs import JobResult, Jobs
from tests.runtime.scenarios import Training, build_module, hashes, wait_for_joiners

STAGES, MICRO_BATCHES, STEPS = 3, 4, 5
EAGER = {"redundancy": {"mode": "eager", "offload": "recompute"}}
FULL = {"redundancy": {"mode": "full", "offload": "recompute"}}


def kill(step: int, stage: int, at: str, micro_batch: int | None = None) -> dict[str, Any]:
    where = {"step": step, "pipeline": 0, "stage": stage, "at": at}
    return where if micro_batch is None else {**where, "micro_batch": micro_batch}


# Each stage once. Two workers join after the first two losses, and the third meets what they hold.
LOSSES = [kill(1, 1, "backward", 1), kill(2, 0, "forward", 2), kill(4, 2, "backward", 2)]


def train_model(name: str, training: Training, waits: dict[str, int], folder: str | None) -> dict[str, Any]:
    """Train the model called ``name``; losses, digest and hashes of all parameters and buffers that are hosted here.

    ``folder``: with images to train on, cut anew in each epoch and read beforehand by a thread.
    """
    model = model_named(name)
    layers = model.layers(seed=3)
    module_of = lambda: BalancedPipeline(  # noqa: E731 (the process group must be there before)
        layers,
        costs=layer_costs(layers, model.sample),
        loss_fn=model.loss,
        num_stages=training.stages,
        partition_method="parameters",
        activation_checkpoint_interval=training.module.get("activation_checkpoint_interval", 0),
        checkpointable_layers=list(model.repeated) if training.module else None,
    )
    engine = build_module(training, module_of)
    shape = BatchShape(micro_batch_size=2, micro_batches=training.micro_batches)
    data = model.open_data(little_data(name) if folder is None else DataPaths(Path(folder)), 1)
    follows = {"shape": shape, "current_step": lambda: int(engine.global_steps), "threads": int(folder is not None)}

    def source(pipeline: int, step: int) -> StepBatches:
        return StepBatches(data, pipeline=pipeline, **follows)

    engine.set_data_source(source)
    losses: dict[str, float] = {}
    while engine.global_steps < training.steps:
        step = str(engine.global_steps)
        wait_for_joiners(engine, waits.get(step, 0))
        losses[step] = float(engine.train_batch(source(0, 0)))
    result = {"losses": losses, "digest": engine.state_digest(), "hashes": hashes(engine), "rank": os.environ["RANK"]}
    engine.close()
    return result


def all_hashes(result: JobResult) -> dict[str, str]:
    """Of all layers, from whoever hosts them at the end; wherever one is to be seen, it is the same."""
    merged: dict[str, str] = {}
    for rank in result.survivors:
        for key, found in result.values[rank]["hashes"].items():
            pipeline, _, name = key.split("/", 2)  # without which layers the worker has besides
            assert merged.setdefault(f"{pipeline}/{name}", found) == found, f"{key} on rank {rank}"
    return merged


@pytest.mark.parametrize(
    ("name", "bamboo", "module"),
    [
        ("resnet-tiny", {}, {}),
        pytest.param("vgg-tiny", {}, {}, marks=pytest.mark.sweep),
        pytest.param("alexnet-tiny", {}, {}, marks=pytest.mark.sweep),
        pytest.param("gnmt-tiny", {}, {}, marks=pytest.mark.sweep),
        pytest.param("bert-tiny", {}, {}, marks=pytest.mark.sweep),
        pytest.param("gpt2-tiny", {}, {}, marks=pytest.mark.sweep),
        pytest.param("resnet-tiny", EAGER, {}, marks=pytest.mark.sweep),
        pytest.param("resnet-tiny", {}, {"activation_checkpoint_interval": 1}, marks=pytest.mark.sweep),
        pytest.param("gnmt-tiny", EAGER, {}, marks=pytest.mark.sweep),
        pytest.param("bert-tiny", EAGER, {}, marks=pytest.mark.sweep),
        pytest.param("gnmt-tiny", FULL, {}, marks=pytest.mark.sweep),
    ],
)
def test_every_stage_is_lost_and_workers_join(
    jobs: Jobs, name: str, bamboo: dict[str, Any], module: dict[str, Any], tmp_path: Path
) -> None:
    folder = images(tmp_path) if name == "resnet-tiny" else None
    plain = trained(jobs, name, bamboo, module, faults=[], folder=folder)
    disturbed = trained(jobs, name, bamboo, module, faults=LOSSES, joining=2, folder=folder)
    assert disturbed.codes.count(-9) == len(LOSSES), disturbed.transcript()
    expected = plain.common("losses")
    for rank in disturbed.survivors:
        losses = disturbed.values[rank]["losses"]
        assert losses and losses == {step: expected[step] for step in losses}, f"rank {rank}"
    assert disturbed.common("digest") == plain.common("digest")
    seen, wanted = all_hashes(disturbed), all_hashes(plain)
    if name == "resnet-tiny":
        assert any("running_var" in key for key in wanted)
    assert ("running statistics differ in last bits" in plain.transcript()) == bool(module), plain.transcript()
    if module:  # the exception that the job says at its start
        seen, wanted = ({key: h for key, h in each.items() if "running_" not in key} for each in (seen, wanted))
    assert seen == wanted


def images(folder: Path) -> str | None:
    """Twelve images of two classes, fewer than are used; None where there is no Pillow to read them."""
    try:
        from PIL import Image
    except ImportError:
        return None
    pixels = np.random.default_rng(0).integers(0, 256, (12, 40, 50, 3), dtype=np.uint8)
    for index, each in enumerate(pixels):
        file = folder / f"class{index % 2}" / f"{index}.png"
        file.parent.mkdir(exist_ok=True)
        Image.fromarray(each).save(file)
    return str(folder)


def trained(
    jobs: Jobs,
    name: str,
    bamboo: dict[str, Any],
    module: dict[str, Any],
    *,
    faults: Sequence[dict[str, Any]],
    joining: int = 0,
    folder: str | None = None,
) -> JobResult:
    mode = "-".join(["eager"] * bool(bamboo) + ["checkpoints"] * bool(module) + ["killed"] * bool(faults))
    training = Training(
        f"{name}-{mode}",
        STAGES,
        steps=STEPS,
        micro_batches=MICRO_BATCHES,
        bamboo={"debug_check_shadows": 1, **bamboo},
        module=module,
        faults=list(faults),
    )
    waits = {"3": joining} if joining else {}
    return jobs.run(
        train_model,
        world=STAGES,
        joining=joining,
        joining_after_deaths=2,
        name=name,
        training=training,
        waits=waits,
        folder=folder,
    )


@pytest.mark.sweep
@pytest.mark.parametrize("micro_batch", range(MICRO_BATCHES))
@pytest.mark.parametrize("bamboo", [EAGER, FULL], ids=["eager", "full"])
def test_what_a_redundant_forward_gave_is_sent_in_place_of_the_owners(
    jobs: Jobs, bamboo: dict[str, Any], micro_batch: int
) -> None:
    """An LSTM's kernels differ where no gradient is asked for."""
    plain = trained(jobs, "gnmt-tiny", bamboo, {}, faults=[])
    disturbed = trained(jobs, "gnmt-tiny", bamboo, {}, faults=[kill(2, 1, "send_activation", micro_batch)])
    assert disturbed.codes.count(-9) == 1, disturbed.transcript()
    assert disturbed.common("digest") == plain.common("digest")
