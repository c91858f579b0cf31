"""DeepSpeed's settings against the grid: ZeRO, stages, layers, batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from deepspeed_bamboo.config.requirements import ModelKind, validate_deepspeed_settings
from deepspeed_bamboo.doctor.finding import Finding, warning
from deepspeed_bamboo.doctor.subject import Subject
from deepspeed_bamboo.errors import ConfigError

BATCH_SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_BATCH, _MICRO, _STEPS = BATCH_SIZES


def check_settings(subject: Subject) -> Iterator[Finding]:
    """Checks for settings that the job would refuse at its start, or that make it slow."""
    try:
        validate_deepspeed_settings(
            subject.settings,
            model=ModelKind.PIPELINE,
            model_name="PipelineModule",
            stages=subject.stages,
            world_size=subject.stages or 1,  # any number of workers will do
        )
    except ConfigError as error:
        for problem in error.problems:
            what, _, remedy = problem.rpartition("; ")
            yield Finding(what or problem, remedy)
    yield from _grid_findings(subject)
    model = subject.model
    if model is not None and subject.stages is not None and subject.stages > model.layers:
        yield Finding(
            f"{model.name} has {model.layers} layers, too few for {subject.stages} stages",
            f"use at most {model.layers} stages, or more pipelines",
        )
    if subject.settings:
        yield from _batch_findings(subject)
        if subject.workers is None and subject.on_cpu and (subject.stages or subject.settings.get(_BATCH)):
            yield warning(
                "nothing says how many workers there will be: whether batch and memory fit them was not looked at",
                "give --hostfile FILE with a line NAME slots=N for each machine",
            )


def _grid_findings(subject: Subject) -> Iterator[Finding]:
    if subject.grid is None or subject.workers is None:
        return
    pipelines, stages = subject.grid
    apart = subject.workers - pipelines * stages
    what = f"{subject.workers} workers train {pipelines} pipelines of {stages} stages"
    if apart > 0:
        yield warning(f"{what}, and {apart} stand by", "choose stages that divide the workers, or keep them as spares")
    elif apart < 0:
        most = -(-pipelines * stages // subject.workers)
        uneven = pipelines * stages % subject.workers
        yield warning(
            f"{what}: some host {most} stages, and all others wait for them"
            if uneven
            else f"{what}: each hosts {most} stages",
            "start more workers, or train fewer pipelines",
        )


def _batch_findings(subject: Subject) -> Iterator[Finding]:
    settings = subject.settings
    sizes = {name: settings[name] for name in (_BATCH, _MICRO, _STEPS) if settings.get(name) is not None}
    for name, value in sizes.items():
        if not isinstance(value, int) or value < 1:
            yield Finding(f"{name} is {value!r}", "write a whole number from 1")
            return
    if _BATCH not in sizes and _MICRO not in sizes:
        yield Finding(f"neither {_BATCH} nor {_MICRO} is there", f"write {_MICRO} and {_STEPS}")
        return
    if subject.grid is None:
        return
    pipelines, stages = subject.grid
    micro_batches = _micro_batches(sizes, pipelines)
    if micro_batches is None:
        yield Finding(
            f"{', '.join(f'{name} {value}' for name, value in sizes.items())} do not fit {pipelines} pipelines",
            f"{_BATCH} must be {_MICRO} x {_STEPS} x {pipelines}; leave one of them out",
        )
    elif stages > 1 and micro_batches < stages:
        idle = (stages - 1) / (micro_batches + stages - 1)
        yield warning(
            f"{micro_batches} micro-batches in {stages} stages: each stage waits {100 * idle:.0f} % of the time",
            f"raise {_STEPS} to {4 * stages}, with smaller micro-batches, or use fewer stages",
        )


def micro_batches_of(settings: Mapping[str, Any], *, pipelines: int) -> int | None:
    """Of a step in each pipeline, by a DeepSpeed configuration; None where it gives no such number."""
    sizes = {name: settings[name] for name in BATCH_SIZES if settings.get(name) is not None}
    if not sizes or any(not isinstance(value, int) or value < 1 for value in sizes.values()):
        return None
    return _micro_batches(sizes, pipelines)


def _micro_batches(sizes: Mapping[str, Any], pipelines: int) -> int | None:
    batch = batch_of(sizes, pipelines)
    return None if batch is None else batch[1]


def batch_of(sizes: Mapping[str, int], pipelines: int) -> tuple[int, int] | None:
    """Samples of a micro-batch, and micro-batches of a step in each pipeline, as DeepSpeed fills in what is missing.

    ``sizes``: those of BATCH_SIZES that are there. None: they don't fit together.
    """
    micro = sizes.get(_MICRO)
    if _BATCH not in sizes:
        return micro or 1, int(sizes.get(_STEPS, 1))
    steps = sizes.get(_STEPS, 1 if micro is None else max(1, sizes[_BATCH] // (micro * pipelines)))
    if micro is None:
        micro = max(1, sizes[_BATCH] // (steps * pipelines))
    return (int(micro), int(steps)) if micro * steps * pipelines == sizes[_BATCH] else None
