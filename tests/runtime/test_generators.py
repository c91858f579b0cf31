"""Generators of numpy and Python that layers have are where they were in a replica, and seeded in the same forwards."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from deepspeed.pipe import LayerSpec
from torch import nn

from deepspeed_bamboo.runtime.comm.encoding import decode, encode
from deepspeed_bamboo.runtime.stock.description import describe
from deepspeed_bamboo.runtime.stock.generator_forms import BITS
from deepspeed_bamboo.runtime.stock.held_attributes import MovingAttributes, global_values
from deepspeed_bamboo.runtime.stock.likeness import liken
from deepspeed_bamboo.runtime.stock.random_sources import sources_of
from deepspeed_bamboo.runtime.stock.randomness import ModelGenerators
from tests.runtime.test_held_attributes import Stage, sent

CPU = torch.device("cpu")
GLOBAL = np.random.default_rng(7)


class Holder(nn.Module):
    """Holds one thing."""

    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__()
        self.held = make()


def _spawned() -> np.random.Generator:
    return np.random.default_rng(3).spawn(2)[1]


def draw(generator: Any) -> list[float]:
    """Three numbers, of two kinds: what is left of one half of a word shows, too."""
    if hasattr(generator, "gauss"):
        return [generator.random(), generator.gauss(0, 1), generator.getrandbits(7)]
    numbers = getattr(generator, "integers", None) or generator.randint
    return [float(generator.normal()), float(numbers(100, dtype=np.uint32)), float(numbers(100, dtype=np.uint32))]


MAKERS: dict[str, Callable[[], Any]] = {
    "python": lambda: random.Random(1),
    "old": lambda: np.random.RandomState(1),
    "old, other bits": lambda: np.random.RandomState(np.random.Philox(1)),
    "from the clock": np.random.default_rng,
    "spawned": _spawned,
    **{name: lambda kind=kind: np.random.Generator(kind(1)) for name, kind in BITS.items()},
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
@pytest.mark.parametrize("there", ["alike", "nothing", "another"])
def test_a_replica_draws_what_its_owner_does_next(make: Callable[[], Any], there: str) -> None:
    held: dict[str, Callable[[], Any]] = {
        "alike": make,
        "nothing": lambda: None,
        "another": lambda: np.random.RandomState(np.random.SFC64(9)),
    }
    owner, replica = Stage(LayerSpec(Holder, lambda: [make()])), Stage(LayerSpec(Holder, lambda: [held[there]()]))
    mine = owner.forward_funcs[0].held[0]
    moving = MovingAttributes()
    moving.look(owner, by_script=True)
    draw(mine)
    assert moving.look(owner, by_script=False), "a forward has moved it"
    MovingAttributes().accept(replica, sent(moving.state(owner)))
    other = replica.forward_funcs[0].held[0]
    assert type(other) is type(mine) and other is not mine
    assert draw(other) == draw(mine)
    if hasattr(mine, "spawn"):
        assert draw(other.spawn(1)[0]) == draw(mine.spawn(1)[0])


def test_generators_that_share_their_bits_still_do() -> None:
    def two() -> list[np.random.Generator]:
        bits = np.random.PCG64(1)
        return [np.random.Generator(bits), np.random.Generator(bits)]

    owner, replica = Stage(LayerSpec(Holder, two)), Stage(LayerSpec(Holder, list))
    MovingAttributes().accept(replica, sent(MovingAttributes().state(owner, moving_only=False)))
    (one, other), mine = replica.forward_funcs[0].held, owner.forward_funcs[0].held
    assert one.bit_generator is other.bit_generator
    assert [draw(one), draw(other)] == [draw(mine[0]), draw(mine[1])]


def test_what_every_process_has_one_of_stays_where_it_is() -> None:
    made: list[Any] = [random._inst, np.random.mtrand._rand, torch.default_generator]  # type: ignore[attr-defined]
    owner, replica = Stage(LayerSpec(Holder, lambda: list(made))), Stage(LayerSpec(Holder, list))
    state = sent(MovingAttributes().state(owner, moving_only=False))
    before = random.getstate()
    random.random()
    now = random.getstate()
    MovingAttributes().accept(replica, state)
    assert random.getstate() == now != before
    assert all(one is other for one, other in zip(replica.forward_funcs[0].held, made, strict=True))


class Own(random.Random):
    """What it does may be anything."""


def test_those_of_other_classes_are_named_unless_each_forward_seeds_them() -> None:
    moving = MovingAttributes()
    stage = Stage(LayerSpec(Holder, lambda: [Own(1)]), LayerSpec(Holder, lambda: Own(1)))
    moving.look(stage, by_script=True)
    assert moving.take_unsendable() == ["attribute 'held' of layer 0 (a generator of the class Own)"]
    moving = MovingAttributes()
    moving.look(Stage(LayerSpec(Holder, random.SystemRandom)), by_script=True)
    assert moving.take_unsendable() == ["attribute 'held' of layer 0 (a generator of the class SystemRandom)"]


class Drawing(nn.Module):
    """Draws from a global variable."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * GLOBAL.random()


def test_one_in_a_global_variable_is_seen_to_move() -> None:
    stage = Stage(LayerSpec(Drawing))
    before = global_values(stage)
    stage.train_once(torch.ones(1))
    after = global_values(stage)
    assert [name for name in after if after[name] != before[name]] == ["GLOBAL of tests.runtime.test_generators"]


class Lazy(nn.Module):
    """Makes its generators when it first needs them, some later than others."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, _: Any) -> float:
        self.calls += 1
        if self.calls > 1 and not hasattr(self, "late"):
            self.late = random.Random(2)
        if not hasattr(self, "early"):
            self.early = np.random.default_rng(0)
        return float(self.early.random()) + (self.late.random() if self.calls > 1 else 0.0)


@pytest.mark.parametrize("since", [0, 1, 2, 7], ids=lambda step: f"from step {step} on")
@pytest.mark.parametrize("used", [False, True], ids=["a new process", "one that has trained"])
def test_one_that_a_forward_makes_is_seeded_in_the_same_forwards_everywhere(since: int, used: bool) -> None:
    """Whatever was searched before, and however often the script's own code ran in between."""
    here, there = ModelGenerators(CPU), ModelGenerators(CPU)
    owner, replica = Stage(LayerSpec(Lazy)), Stage(LayerSpec(Lazy))
    moving = MovingAttributes()
    moving.look(owner, by_script=True)
    for step in range(5) if used else ():
        there.seed(step, module=Stage(LayerSpec(Lazy)), activity=step)
        there.give_back()
    for step in range(9):
        if step == since:
            MovingAttributes().accept(replica, sent(moving.state(owner)) if since else None)
            replica.forward_funcs[0].calls = owner.forward_funcs[0].calls
        for micro_batch in range(3):
            numbers = []
            for generators, stage in ((here, owner), (there, replica)):
                if stage is replica and step < since:
                    continue
                generators.seed(100 * step + micro_batch, module=stage, activity=step)
                numbers.append(stage.forward_funcs[0](None))
                if stage is owner and micro_batch == step % 3:
                    generators.give_back()  # for a data iterator, say
            assert len(set(numbers)) == 1, (step, micro_batch)
        for generators in (here, there):
            generators.give_back()
        moving.look(owner, by_script=False)
    assert len(sources_of(owner)) == 2


@pytest.mark.parametrize("make", [*MAKERS.values(), torch.Generator], ids=[*MAKERS.keys(), "torch"])
def test_one_that_a_replica_lacks_is_no_other_stages_own(make: Callable[[], Any]) -> None:
    owner, example, replica = (Stage(LayerSpec(Holder, lambda: None)) for _ in range(3))
    owner.forward_funcs[0].held, example.forward_funcs[0].held = make(), make()
    liken(replica, decode(encode(describe(owner, None))), examples=[example], device=CPU)
    made = replica.forward_funcs[0].held
    assert type(made) is type(make()) and made is not example.forward_funcs[0].held
