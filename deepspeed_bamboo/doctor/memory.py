"""Device memory that state takes in each mode, against what the GPUs have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from deepspeed_bamboo.config.sections import is_on, section_of, zero_stage
from deepspeed_bamboo.doctor.finding import Finding, warning
from deepspeed_bamboo.doctor.subject import Subject

_GIB = 1 << 30
_SHADOWLESS = "off"
_MOMENTS = {"SGD": 0, "LION": 1}  # numbers that the optimizer keeps for each parameter; others: 2
_USUAL_MOMENTS = 2
_ROOM_FOR_ACTIVATIONS_SHARE = 0.2


def check_memory(subject: Subject) -> Iterator[Finding]:
    """Where the model is known: parameters, gradients and optimizer state, without activations."""
    gpus = None if subject.on_cpu else subject.gpus
    if subject.model is None or subject.grid is None or not gpus:
        return
    mode = subject.section.redundancy.mode
    copies = subject.section.redundancy.copies
    needed = state_bytes(subject, shadows=0 if mode == _SHADOWLESS else copies)
    there = min(gpu.memory_bytes for gpu in gpus.values())
    amounts = ", ".join(
        f"{name} {state_bytes(subject, shadows=shadows) / _GIB:.1f} GiB"
        for name, shadows in (("off", 0), ("lazy, eager, auto and full", 1), ("copies: 2", 2))[: 1 + copies]
    )
    what = (
        f"state takes {needed / _GIB:.1f} GiB in mode {mode}, of {there / _GIB:.1f} GiB, before activations ({amounts})"
    )
    fewer = "copies: 1" if copies > 1 else "mode off"
    remedy = f"use more stages, bf16 or ZeRO stage 1 with several pipelines, or {fewer}"
    if needed > there:
        yield Finding(what, remedy)
    elif needed > (1 - _ROOM_FOR_ACTIVATIONS_SHARE) * there:
        yield warning(what, remedy)


def state_bytes(subject: Subject, *, shadows: int) -> int:
    """Of the worker with most of it. Its ``shadows`` are the next stages' state; fewer workers than stages host
    several."""
    if subject.model is None or subject.grid is None or subject.workers is None:
        return 0
    pipelines, stages = subject.grid
    hosted = max(1, -(-pipelines * stages // subject.workers))
    parameters = subject.model.stage_parameters
    each = bytes_each(subject.settings, pipelines)
    own = [round(count * each) for count in parameters]
    return hosted * max(
        sum(own[(stage + distance) % len(own)] for distance in range(shadows + 1)) for stage in range(len(own))
    )


def bytes_each(settings: Mapping[str, Any], pipelines: int) -> float:
    """What a parameter takes with its gradient and optimizer state, by DeepSpeed's ``settings``."""
    kind = str(section_of(settings, "optimizer").get("type", "Adam")).upper()
    momentum = section_of(settings, "optimizer", "params").get("momentum")
    moments = _MOMENTS.get(kind, _USUAL_MOMENTS) + bool(momentum)
    half = any(is_on(settings, name) for name in ("bf16", "fp16"))
    spread = pipelines if is_on(settings, "bf16") or zero_stage(settings) else 1
    # Parameter and gradient; then master weight and moments, which bf16 and ZeRO spread over the pipelines.
    held = (2 + (4 if is_on(settings, "bf16") else 2)) if half else 8
    return held + ((4 if half else 0) + 4 * moments) / spread
