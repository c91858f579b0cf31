"""What a placement takes on workers' devices, for ``ds_bamboo plan --config``: estimated from settings and model."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from deepspeed_bamboo.cli.doctor import model_facts
from deepspeed_bamboo.cli.node_files import measured_micro_batches
from deepspeed_bamboo.config.sections import is_on, section_problems
from deepspeed_bamboo.core.placement import Placement, WorkerId
from deepspeed_bamboo.core.placing.holding import Memory
from deepspeed_bamboo.doctor.memory import bytes_each
from deepspeed_bamboo.doctor.settings import BATCH_SIZES, batch_of
from deepspeed_bamboo.doctor.subject import ModelFacts
from deepspeed_bamboo.elastic.settings_source import settings_in
from deepspeed_bamboo.errors import ConfigError

HEADING = ("worker", "stages", "shadows", "state", "of shadows", "activations", "together")
_MIB, _GIB = 1 << 20, 1 << 30
_HALF = 0.5
_HALVINGS = 6
_MOST_SAMPLES = 1_000_000
_ASSUMED = 8


def estimate(
    model: ModelFacts, settings: Mapping[str, Any], *, pipelines: int, room: Mapping[WorkerId, int] | None = None
) -> Memory:
    """Bytes by stage: parameters, gradients and optimizer state, and what a micro-batch's forward keeps."""
    each = bytes_each(settings, pipelines)
    half = any(is_on(settings, name) for name in ("bf16", "fp16"))
    samples = batch_in(settings, pipelines=pipelines)[0] * (_HALF if half else 1.0)
    return Memory(
        tuple(round(count * each) for count in model.stage_parameters),
        tuple(round(kept * samples) for kept in model.stage_activations),
        room or {},
    )


def batch_in(settings: Mapping[str, Any], *, pipelines: int) -> tuple[int, int]:
    """Samples of a micro-batch and micro-batches of a step, as DeepSpeed takes ``settings``. Raises ConfigError."""
    sizes = {name: settings[name] for name in BATCH_SIZES if settings.get(name) is not None}
    for name, value in sizes.items():
        if not (type(value) is int and 1 <= value <= _MOST_SAMPLES):
            raise ConfigError(f"{name} is {value!r}; write a whole number from 1 to {_MOST_SAMPLES}")
    batch = batch_of(sizes, pipelines)
    if batch is None:
        whole, micro, steps = BATCH_SIZES
        raise ConfigError(
            f"{', '.join(f'{name} {value}' for name, value in sizes.items())} do not fit --pipelines {pipelines}; "
            f"{whole} must be {micro} x {steps} x {pipelines}: leave one of them out"
        )
    return batch


def micro_batches(args: argparse.Namespace) -> tuple[int, str]:
    """Micro-batches of a step, and where the number is from: the option, the configuration, the profile, or assumed.

    Raises ConfigError.
    """
    if args.micro_batches is not None:
        return args.micro_batches, "--micro-batches"
    if args.config is not None and args.model is not None:
        samples, count = batch_in(settings_in(args.config), pipelines=args.pipelines)
        return count, f"{args.config}, with micro-batches of {samples} samples"
    found = None if args.profile is None else measured_micro_batches(args.profile)
    return (_ASSUMED, "assumed") if found is None else (found, str(args.profile))


def asked_for(args: argparse.Namespace, workers: Iterable[WorkerId]) -> Memory | None:
    """The estimate for ``--config`` and ``--model``; None without them. Raises ConfigError."""
    if args.config is None and args.model is None:
        if args.device_gib is not None:
            raise ConfigError("--device-gib needs --config and --model, from which it is estimated what stages take")
        return None
    if args.config is None or args.model is None:
        raise ConfigError("what stages take is estimated from --config and --model together; give both")
    settings = settings_in(args.config)
    problems = tuple(section_problems(settings))
    if problems:
        raise ConfigError(*problems, where=args.config)
    model = model_facts(args.model, args.stages)
    if model is None:
        raise ConfigError("--model needs torch and deepspeed, which are not installed here; install them")
    if len(model.stage_parameters) != args.stages:
        raise ConfigError(f"{args.model} has {model.layers} layers, too few for {args.stages} stages; use fewer")
    room = {} if args.device_gib is None else dict.fromkeys(workers, round(args.device_gib * _GIB))
    return estimate(model, settings, pipelines=args.pipelines, room=room)


def memory_rows(placement: Placement, memory: Memory, *, micro_batches: int) -> Iterator[tuple[str, ...]]:
    """A row of HEADING for every worker that holds something; sizes in MiB."""
    held = memory.held(placement, micro_batches=micro_batches)
    for worker in placement.workers:
        owned, shadows = placement.hosted_by(worker), placement.shadowed_by(worker)
        state = sum(memory.state[c.stage] for c in owned)
        shadowed = sum(memory.state[c.stage] for c in shadows)
        sizes = (state, shadowed, held[worker] - state - shadowed, held[worker])
        yield worker, str(len(owned)), str(len(shadows)), *(f"{size / _MIB:.1f} MiB" for size in sizes)


LEGEND = (
    "device memory, estimated: parameters, gradients and optimizer state, and",
    "activations of the micro-batches that are on their way at once. Kernels and the",
    "allocator need more besides",
)


def answer(placement: Placement, memory: Memory, *, micro_batches: int) -> str:
    """Whether what workers hold fits their devices, where they are named, and how much the fullest has."""
    held = memory.held(placement, micro_batches=micro_batches)
    fullest = max(held, key=lambda worker: held[worker])
    size = held[fullest]
    has = f"{fullest}, has " + (f"{size / _GIB:.1f} GiB" if size >= _GIB else f"{size / _MIB:.1f} MiB")
    if not memory.room:
        return f"the fullest, {has}"
    return f"all fit into {max(memory.room.values()) / _GIB:g} GiB: the fullest, {has}"


def too_little(placed: Callable[[Memory], Placement], memory: Memory, *, micro_batches: int) -> str:
    """That no placement fits devices of this size, and the least size for which one was found.

    ``placed`` is the placement that is found for other devices.
    """
    given = max(memory.room.values())
    least = _least_room(placed, memory, given, micro_batches)
    return (
        f"no placement was found that fits the devices: --device-gib is {given / _GIB:.2f}, and the least for which "
        f"one was found is {least / _GIB:.2f}; use such devices, more workers, more stages, bf16, or mode off"
    )


def _least_room(placed: Callable[[Memory], Placement], memory: Memory, given: int, micro_batches: int) -> int:
    """Bytes of a device: twice as large until a placement fits, then halfway back a few times."""

    def held(room: int) -> int:
        wider = replace(memory, room=dict.fromkeys(memory.room, room))
        return max(memory.held(placed(wider), micro_batches=micro_batches).values())

    low, room = given, given
    found = held(room)
    while found > room:
        low, room = room, 2 * room
        found = held(room)
    best = found
    for _ in range(_HALVINGS):
        middle = (low + best) // 2
        found = held(middle)
        if found <= middle:
            best = found
        else:
            low = middle
    return best
