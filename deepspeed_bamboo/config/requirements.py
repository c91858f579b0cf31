"""What a DeepSpeed job must fulfil so that its stages can be rebuilt elsewhere. Pure checks over extracted facts."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from deepspeed_bamboo.config.sections import is_on, section_of, section_problems, zero_stage
from deepspeed_bamboo.errors import ConfigError


class ModelKind(Enum):
    """What was passed to ``initialize`` as the model."""

    PIPELINE = "PipelineModule"
    DUALPIPEV = "DualPipeVModule"
    OTHER = "other"


@dataclass(frozen=True)
class ModelShape:
    """How a pipeline model is laid out and cut.

    ``axes``: the sizes of the topology's axes by name, in its order. ``places``: for each rank its pipeline and stage,
    where the topology has both. ``bounds``: the first layer of each stage, and the number of all.
    """

    axes: Mapping[str, int]
    places: tuple[tuple[int, int], ...]
    bounds: tuple[int, ...]


def shape_problems(shape: ModelShape) -> Iterator[str]:
    """What is wrong with a topology or a partition, a sentence each."""
    axes = dict(shape.axes)
    cut = {name: size for name, size in axes.items() if name not in ("pipe", "data") and size > 1}
    shown = ", ".join(f"{name} {size}" for name, size in axes.items())
    stages, pipelines = axes.get("pipe", 1), axes.get("data", 1)
    if cut:
        yield (
            f"the topology given to PipelineModule cuts layers in parts ({shown}), and tensor parallelism is not "
            f"supported; give {' and '.join(sorted(cut))} size 1, or run this model without the plugin"
        )
    elif "pipe" not in axes:
        yield f'the topology given to PipelineModule has no axis "pipe" ({shown}); use PipeDataParallelTopology'
    elif shape.places != tuple((rank % pipelines, rank // pipelines) for rank in range(stages * pipelines)):
        yield (
            f"the topology given to PipelineModule has its axes in the order {', '.join(axes)}, so neighbouring ranks "
            'are neighbouring stages; put "pipe" before "data", as PipeDataParallelTopology(num_pp, num_dp) does'
        )
    empty = [stage for stage, (first, stop) in enumerate(itertools.pairwise(shape.bounds)) if first == stop]
    if empty:
        named = f"stage {empty[0]}" if len(empty) == 1 else f"stages {', '.join(map(str, empty))}"
        yield (
            f"{named} of {stages} {'has' if len(empty) == 1 else 'have'} no layers (the model has {shape.bounds[-1]}); "
            "use fewer stages, or another partition_method"
        )


def validate_deepspeed_settings(
    settings: Mapping[str, Any],
    *,
    model: ModelKind,
    model_name: str,
    stages: int | None,
    world_size: int,
    shape: ModelShape | None = None,
    further: Iterable[str] = (),
) -> None:
    """Raise one ConfigError that lists everything that would prevent the recovery of lost stages.

    ``settings``: the DeepSpeed configuration. ``model_name``: the class of the model, for messages.
    ``stages``: None for a model without stages. ``world_size``: workers at the start.
    ``shape``: how the model is cut, if it is a pipeline. ``further``: what else was found.
    """
    problems = [
        *_model_problems(model, model_name=model_name),
        *settings_problems(settings),
        *_size_problems(stages, world_size=world_size),
        *(() if shape is None else shape_problems(shape)),
        *further,
    ]
    if problems:
        raise ConfigError(*problems, where="deepspeed_bamboo can't run this job")


def _model_problems(model: ModelKind, *, model_name: str) -> Iterator[str]:
    if model is ModelKind.DUALPIPEV:
        yield f"the model is a {model_name}, and DualPipeV is not supported; use deepspeed.pipe.PipelineModule"
    elif model is ModelKind.OTHER:
        yield (
            f"the model is a {model_name} and no PipelineModule; wrap its layers in deepspeed.pipe.PipelineModule "
            'or set "bamboo": {"enabled": false}'
        )


def settings_problems(settings: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with a DeepSpeed configuration, whatever the model is."""
    yield from section_problems(settings)
    yield from zero_problems(settings)
    yield from parallel_problems(settings)
    yield from logging_problems(settings)
    yield from autocast_problems(settings)
    yield from data_problems(settings)


def zero_problems(settings: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with ZeRO in a DeepSpeed configuration."""
    zero, stage = settings.get("zero_optimization"), zero_stage(settings)
    if stage in (2, 3):
        yield (
            f"zero_optimization.stage is {stage}, and DeepSpeed's pipelines work with ZeRO stages 0 and 1 only; "
            "set it to 1 or 0"
        )
    yield from _offload_problems(zero, stage=stage)


def _offload_problems(zero: Any, *, stage: Any) -> Iterator[str]:
    if stage != 1 or not isinstance(zero, Mapping):
        return
    for name, possible in (("offload_optimizer", ("cpu",)), ("offload_param", ())):
        part = zero.get(name)
        device = part.get("device", "none") if isinstance(part, Mapping) else "none"
        if device not in ("none", None, *possible):
            remedy = '"cpu" or "none"' if possible else '"none"'
            yield (
                f"zero_optimization.{name}.device is {device!r}, which DeepSpeed has for ZeRO stage 3 only; set it to "
                f"{remedy}"
            )
    if zero.get("zenflow") is not None:
        yield (
            "zero_optimization.zenflow is set, and what ZenFlow leaves for later steps isn't known to a shadow; leave "
            "zenflow out (offload_optimizer works without it)"
        )


def parallel_problems(settings: Mapping[str, Any]) -> Iterator[str]:
    """What in a DeepSpeed configuration cuts layers in parts."""
    size = section_of(settings, "tensor_parallel").get("autotp_size", 0)
    if isinstance(size, int) and size > 1:
        yield f"tensor_parallel.autotp_size is {size}, and tensor parallelism is not supported; set it to 0"
    if is_on(settings, "expert_parallel"):
        yield "expert_parallel.enabled is true, and experts spread over workers are not supported; set it to false"


def logging_problems(settings: Mapping[str, Any]) -> Iterator[str]:
    """What in a DeepSpeed configuration times collectives, several of which run at once under the plugin."""
    if not is_on(settings, "comms_logger"):
        return
    section = settings["comms_logger"]
    if section.get("prof_all", True) or section.get("prof_ops"):
        yield (
            "comms_logger.enabled is true, and DeepSpeed's timer of collectives can't run twice at once, as it has to "
            "where a worker hosts several stages; set it to false, or leave comms_logger out"
        )


def autocast_problems(settings: Mapping[str, Any]) -> Iterator[str]:
    """What in a DeepSpeed configuration keeps one loss scale for all that a worker hosts, and sends it to nobody."""
    if not is_on(settings, "torch_autocast") or zero_stage(settings):
        return
    if settings["torch_autocast"].get("dtype") in ("torch.float16", "fp16", "float16", "half"):
        yield (
            "torch_autocast.dtype is float16 without ZeRO, for which DeepSpeed keeps one loss scale in each process, "
            'whatever stages and shadows it has; use the section "fp16" in its place, or dtype bfloat16, or ZeRO 1'
        )


def data_problems(settings: Mapping[str, Any]) -> Iterator[str]:
    """What in a DeepSpeed configuration chooses samples or tokens, and counts for itself how far it is."""
    if is_on(settings, "data_efficiency", "data_sampling", "curriculum_learning"):
        yield (
            "data_efficiency.data_sampling.curriculum_learning.enabled is true, and DeepSpeed's sampler keeps "
            "its position in training_data for itself, so who takes a pipeline over can't continue there; set it to "
            "false, and choose samples by the step in a source of your own (engine.set_data_source)"
        )
    if is_on(settings, "data_efficiency", "data_routing", "random_ltd"):
        yield (
            "data_efficiency.data_routing.random_ltd.enabled is true, and shadows know neither its scheduler nor the "
            "tokens that its layers drop; set it to false"
        )


def _size_problems(stages: int | None, *, world_size: int) -> Iterator[str]:
    if stages is not None and world_size % stages:
        below = world_size - world_size % stages
        counts = f"{below} or {below + stages}" if below else f"{stages}"
        yield (
            f"{world_size} workers can't be divided into pipelines of {stages} stages; "
            f"start {counts} workers or change the number of stages"
        )
