"""What is kept to do steps again: micro-batches, what the script did before each step, and copies of stages."""

from __future__ import annotations

import dataclasses
import random
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_bamboo.core.grid import Coordinate
from deepspeed_bamboo.runtime.comm.encoding import decode, encode
from deepspeed_bamboo.runtime.iteration.micro_batches import PipelineData
from deepspeed_bamboo.runtime.iteration.step_history import StepHistory
from deepspeed_bamboo.runtime.recovery.memory_parts import MemoryPart, MemoryParts, SealedPart
from deepspeed_bamboo.runtime.stock.noted_values import NotedValues
from deepspeed_bamboo.runtime.stock.torch_modes import TorchModes, training_modes

PER_STEP = 3


def step_of(data: PipelineData, step: int, *, count: int = PER_STEP) -> list[int]:
    return [data.get(0, micro_batch, step=step) for micro_batch in range(count)]


@given(st.data())
def test_every_step_gets_its_own_micro_batches_however_often_it_is_done(data: st.DataObject) -> None:
    source = PipelineData(home=0)
    source.set_iterator(iter(range(10_000)))
    source.keep()
    oldest = step = 0
    for _ in range(20):
        if data.draw(st.booleans()) and step > oldest:
            step_of(source, step, count=data.draw(st.integers(0, PER_STEP)))  # interrupted
            step = data.draw(st.integers(oldest, step))
            source.rewind(step)
        if data.draw(st.booleans()):
            oldest = data.draw(st.integers(oldest, step))
            source.keep_from(oldest)
        assert step_of(source, step) == list(range(PER_STEP * step, PER_STEP * (step + 1)))
        source.forget(step)
        assert source.used(0, micro_batches=PER_STEP) == (PER_STEP * step, PER_STEP * (step + 1))
        step += 1


def test_a_factory_makes_them_again() -> None:
    source = PipelineData(home=1)
    source.set_factory(lambda pipeline, step: iter(range(PER_STEP * step, 1000)))
    for step in (0, 1, 2):
        assert step_of(source, step) == [PER_STEP * step + micro_batch for micro_batch in range(PER_STEP)]
        source.complete(PER_STEP, step=step)
        source.forget(step)
    source.rewind(1)
    assert step_of(source, 1) == [3, 4, 5]


def test_what_the_script_did_belongs_to_the_step_that_followed() -> None:
    history = StepHistory()
    history.begin_anew(4)
    history.note(evaluated=2)
    assert history.of(4).evaluated == 2 and history.of(3).evaluated == 0
    assert history.done(4, loss=0.5) is None
    history.note(evaluated=1)
    assert (history.of(4).evaluated, history.of(5).evaluated) == (2, 1)
    assert history.done(4, loss=0.7) == 0.5  # again
    assert history.plain_from == 6
    history.begin_at(5)
    assert history.first == 5 and history.of(4).loss is None


def test_modes_are_those_of_the_step() -> None:
    host = torch.device("cpu")
    history, plain = StepHistory(), TorchModes.now(host)
    history.done(0, loss=0.5, modes=plain)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = TorchModes.now(host)
    history.done(1, loss=0.5, modes=mixed)
    assert plain != mixed and history.newest_modes == mixed and history.of(0).modes == plain
    assert history.plain_from == 1, "who came after the first step trains in the modes of the second"
    with torch.inference_mode(), training_modes(), mixed.again():
        assert torch.is_grad_enabled() and TorchModes.now(host) == mixed
        made = torch.nn.Linear(1, 1)
        with plain.again():
            assert TorchModes.now(host) == plain
    assert not made.weight.is_inference() and TorchModes.now(host) == plain


def test_what_the_script_set_in_layers_is_set_again_in_that_stage_alone() -> None:
    layer, other = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    layer.strength = other.strength = 1.0
    replicas: list[Any] = [
        SimpleNamespace(
            coordinate=Coordinate(0, stage), module=torch.nn.Sequential(part), finish_step=lambda: None, moving=None
        )
        for stage, part in enumerate((layer, other))
    ]
    history = StepHistory()
    history.begin_anew(4)
    history.note(values=NotedValues.of({"0.1": {"0": {"strength": 0.5}}}, {}))
    history.done(4, loss=0.5)
    assert history.plain_from == 5, "who came later has not heard of it"
    for values in history.of(4).values:
        for replica in replicas:
            values.put_into(replica, shadow=False)
    assert (layer.strength, other.strength) == (1.0, 0.5)
    tensors = {"tensors": [torch.zeros(6)], "nodes": [], "where": []}
    history.note(values=NotedValues.of({}, {"0.0": [None, tensors]}))
    assert history.kept_bytes == 24
    history.begin_anew(7)
    assert history.kept_bytes == 0 and not history.of(7).values


def sealed(step: int = 3) -> SealedPart:
    tensors = [torch.arange(6.0).reshape(2, 3), torch.tensor([True, False]), torch.zeros(0)]
    part = MemoryPart(step, Coordinate(0, 1), encode([{"lr": 0.1}, {"modules": {}}]), tensors)
    return SealedPart(part, part.sha256())


def test_a_copy_that_is_not_what_it_was_is_found() -> None:
    assert sealed().is_whole()
    for index in range(6):
        damaged = sealed()
        damaged.part.tensors[0].view(-1)[index] += 1
        assert not damaged.is_whole()
    whole = sealed()
    others = [
        MemoryPart(4, whole.part.coordinate, whole.part.body, whole.part.tensors),
        MemoryPart(3, Coordinate(0, 2), whole.part.body, whole.part.tensors),
        MemoryPart(3, whole.part.coordinate, whole.part.body[:-1] + b"x", whole.part.tensors),
        MemoryPart(3, whole.part.coordinate, whole.part.body, whole.part.tensors[:-1]),
        MemoryPart(3, whole.part.coordinate, whole.part.body, [t.clone().reshape(-1) for t in whole.part.tensors]),
    ]
    assert not any(SealedPart(part, whole.sha256).is_whole() for part in others)
    arrived = SealedPart.from_plain(decode(encode(whole.to_plain())), [t.clone() for t in whole.part.tensors])
    assert arrived.is_whole() and arrived.part.state()[1] == {"modules": {}}
    assert (
        whole.is_of(3, Coordinate(0, 1))
        and not whole.is_of(2, Coordinate(0, 1))
        and not whole.is_of(3, Coordinate(0, 2))
    )


def test_none_of_a_thousand_damages_is_taken_for_a_copy() -> None:
    for seed in range(1000):
        draw, damaged = random.Random(seed), sealed()
        part = damaged.part
        how = draw.choice(["bit of a tensor", "bit of the body", "tensor cut", "tensor gone", "body cut", "order"])
        if how == "bit of a tensor":
            flat = draw.choice(part.tensors[:2]).view(torch.uint8).reshape(-1)
            flat[draw.randrange(len(flat))] ^= 1 << draw.randrange(8)
        elif how == "tensor cut":
            part.tensors[0] = part.tensors[0].reshape(-1)[: draw.randrange(6)].clone()
        elif how == "tensor gone":
            del part.tensors[draw.randrange(3)]
        elif how == "order":
            part.tensors[0], part.tensors[1] = part.tensors[1], part.tensors[0]
        else:
            at, body = draw.randrange(len(part.body)), bytearray(part.body)
            body[at] ^= 1 << draw.randrange(8)
            cut = bytes(body) if how == "bit of the body" else part.body[:at]
            damaged = SealedPart(dataclasses.replace(part, body=cut), damaged.sha256)
        assert not damaged.is_of(3, Coordinate(0, 1)), (seed, how)


def test_copies_of_steps_that_are_not_wanted_go() -> None:
    parts = MemoryParts()
    for step in (1, 2, 3):
        parts.put(sealed(step))
    assert parts.held() == dict.fromkeys((1, 2, 3), (Coordinate(0, 1),)) and parts.size() == 3 * sealed().part.size
    parts.keep_only((2, 3))
    parts.remove(3, Coordinate(0, 1))
    assert parts.held() == {2: (Coordinate(0, 1),)} and parts.get(3, Coordinate(0, 1)) is None
