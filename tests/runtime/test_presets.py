"""Every preset in configs/ trains: with its settings, and the tiny variant of the model that its command names."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepspeed_bamboo.config.section import load_deepspeed_settings
from deepspeed_bamboo.models.batches import BatchShape, StepBatches
from deepspeed_bamboo.models.catalog import MODELS, model_named
from deepspeed_bamboo.models.costs import layer_costs
from deepspeed_bamboo.models.partition import BalancedPipeline
from tests.models.whole import little_data
from tests.runtime.jobs import Jobs
from tests.runtime.scenarios import Training, build_module

PRESETS = sorted((Path(__file__).parents[2] / "configs").glob("*.json"))
WORKERS, STEPS, MICRO_BATCHES = 2, 3, 4


@dataclass(frozen=True)
class Preset:
    """What is tried of a preset: its settings but for sizes, addresses and paths, and the command in its comments."""

    name: str
    model: str
    stages: int
    checkpoint_interval: int
    settings: dict[str, Any]


def read(path: Path) -> Preset:
    """The preset in ``path``."""
    comment = " ".join(line.strip("/ \\") for line in path.read_text(encoding="utf-8").splitlines() if "//" in line)
    settings = load_deepspeed_settings(path)
    optimizer = settings["optimizer"]
    if optimizer["type"] == "Adam":  # DeepSpeed's own is compiled for minutes on a CPU
        settings["optimizer"] = {**optimizer, "params": {**optimizer["params"], "torch_adam": True}}
    settings.update(train_micro_batch_size_per_gpu=2, gradient_accumulation_steps=MICRO_BATCHES)
    if "zero_optimization" in settings:
        settings["zero_optimization"] = {**settings["zero_optimization"], "reduce_bucket_size": 1000}
    stages, interval = (
        re.search(rf"--{option} (\d+)", comment) for option in ("stages", "activation-checkpoint-interval")
    )
    model = re.search(r"--model (\S+)", comment)
    return Preset(
        path.stem,
        model[1] if model else "gpt2-tiny",
        min(WORKERS, int(stages[1]) if stages else WORKERS),
        int(interval[1]) if interval else 0,
        settings,
    )


def tiny(model: str) -> str:
    """The name of the variant that trains in seconds."""
    family = re.match(r"[a-z]+(?:2-)?", model)
    return next(name for name in MODELS if "tiny" in name and family and name.startswith(family[0]))


def train_presets(presets: list[Preset], checkpoints: str) -> dict[str, Any]:
    """A few steps of each; losses, and the mode that was used."""
    results = {}
    for preset in presets:
        print(f"preset {preset.name}", flush=True)
        section = dict(preset.settings["bamboo"])
        section.pop("coordinator", None)
        if "checkpoint" in section:
            section["checkpoint"] = {**section["checkpoint"], "dir": f"{checkpoints}/{preset.name}"}
        settings = {key: value for key, value in preset.settings.items() if key != "bamboo"}
        training = Training(preset.name, preset.stages, settings=settings, bamboo=section, faults=[])
        results[preset.name] = train_preset(preset, training)
    return results


def train_preset(preset: Preset, training: Training) -> list[float]:
    model = model_named(tiny(preset.model))
    layers = model.layers()

    def make_module() -> BalancedPipeline:
        return BalancedPipeline(
            layers,
            costs=layer_costs(layers, model.sample),
            partition_method="parameters",
            loss_fn=model.loss,
            num_stages=preset.stages,
            activation_checkpoint_interval=preset.checkpoint_interval,
            checkpointable_layers=list(model.repeated) if preset.checkpoint_interval else None,
        )

    engine = build_module(training, make_module)
    shape = BatchShape(micro_batch_size=2, micro_batches=MICRO_BATCHES, pipelines=WORKERS // preset.stages)
    data = model.open_data(little_data(model.name), 0)

    def source(pipeline: int, step: int) -> StepBatches:
        return StepBatches(data, shape=shape, current_step=lambda: int(engine.global_steps), pipeline=pipeline)

    engine.set_data_source(source)
    losses = [float(engine.train_batch(source(engine.home, 0))) for _ in range(STEPS)]
    engine.close()
    return losses


def test_every_preset_trains(jobs: Jobs, tmp_path: Path) -> None:
    presets = [read(path) for path in PRESETS]
    assert {tiny(preset.model) for preset in presets} == {name for name in MODELS if "tiny" in name}
    result = jobs.run(train_presets, world=WORKERS, presets=presets, checkpoints=str(tmp_path))
    assert result.codes == [0] * WORKERS, result.transcript()
    for preset in presets:
        losses = result.common(preset.name)
        assert len(set(losses)) == STEPS and all(0 < loss < 20 for loss in losses), (preset.name, losses)
    kept = sorted(path.name for path in tmp_path.iterdir())
    assert kept == sorted(preset.name for preset in presets if "checkpoint" in preset.settings["bamboo"])
