"""What layers and the loss keep in lists, tensors and objects, read, sent and given to another replica."""

from __future__ import annotations

import array
import enum
import functools
import io
import itertools
import tracemalloc
import types
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

from deepspeed_bamboo.models.huggingface.skeleton import Skeleton
from deepspeed_bamboo.runtime.comm.encoding import decode, encode
from deepspeed_bamboo.runtime.stock.class_values import ClassValues
from deepspeed_bamboo.runtime.stock.held_attributes import (
    AttributeState,
    MovingAttributes,
    given_objects,
    global_values,
)
from deepspeed_bamboo.runtime.stock.held_values import Reader
from deepspeed_bamboo.runtime.stock.optimizer_values import (
    accept_optimizer_values,
    optimizer_values,
    unfollowed_hooks,
)
from deepspeed_bamboo.runtime.stock.plain_forms import Parts, differs_by_machine
from tests.runtime.habits import KeepingBlock, Lookahead, warming_up

SEEN: list[float] = []


class Stage(nn.Module):
    """Like a PipelineModule with the last stage only."""

    def __init__(self, *specs: Any, loss: Any = None) -> None:
        super().__init__()
        self.stage_id, self.num_stages, self.loss_fn = 0, 1, loss
        self._layer_specs = list(specs)
        self.forward_funcs = [spec.build() if isinstance(spec, LayerSpec) else spec for spec in specs]
        for index, layer in enumerate(self.forward_funcs):
            if isinstance(layer, nn.Module):
                self.add_module(str(index), layer)

    def train_once(self, x: Tensor) -> Tensor:
        for layer in self.forward_funcs:
            x = layer(x)
        if self.loss_fn is not None:
            x = self.loss_fn(x, torch.zeros(x.shape[0], dtype=torch.int64))
        return x.detach()


def sent(state: AttributeState | None) -> Any:
    """As a message has it."""
    assert state is not None
    header, tensors = encode({**state, "tensors": None}), state["tensors"]
    return {**decode(header), "tensors": [tensor.clone() for tensor in tensors]}


def same_weights(one: nn.Module, other: nn.Module) -> None:
    other.load_state_dict(one.state_dict())


def batch(number: int) -> Tensor:
    return torch.rand(2, 8, generator=torch.Generator().manual_seed(number))


def test_a_replica_computes_what_its_owner_does_from_any_step_on() -> None:
    owner, shadow = (Stage(LayerSpec(KeepingBlock), LayerSpec(KeepingBlock), loss=warming_up()) for _ in range(2))
    same_weights(owner, shadow)
    here, there = MovingAttributes(), MovingAttributes()
    here.look(owner, by_script=True)
    # All of it with the stage's state: a projection that was drawn, too.
    there.accept(shadow, sent(here.state(owner, moving_only=False)))
    for number in range(4):
        for part, other in zip(owner.modules(), shadow.modules(), strict=True):
            if isinstance(part, KeepingBlock) and isinstance(other, KeepingBlock):
                other.rank_scale = part.rank_scale  # a number: see plain_values.py
        if number == 2:  # a loss: it goes on from the last step
            assert torch.equal(shadow.train_once(batch(number)), owner.train_once(batch(number)))
        else:
            owner.train_once(batch(number))
        assert here.look(owner, by_script=False)
        state = sent(here.state(owner))
        there.include(state)
        there.accept(shadow, state)
    assert not here.take_unsendable() and not there.take_unsendable()


def test_what_does_not_move_costs_nothing_after_the_first_looks() -> None:
    stage, moving = Stage(LayerSpec(nn.Linear, 8, 8), LayerSpec(KeepingBlock)), MovingAttributes()
    for _ in range(3):
        assert not moving.look(stage, by_script=True)
    assert moving.state(stage) is None and not moving.at_risk


class Given(nn.Module):
    """Counts in what it is given, or in a global variable."""

    def __init__(self, counts: dict[str, int]) -> None:
        super().__init__()
        self.counts, self.seen, self.steps = counts, SEEN, 0

    def forward(self, x: Tensor) -> Tensor:
        self.counts["forwards"] = self.counts.get("forwards", 0) + 1
        SEEN.append(1.0)
        type(self).made = getattr(type(self), "made", 0) + 1
        return x * self.counts["forwards"]


def test_what_others_have_too_is_not_sent_and_its_moves_are_named() -> None:
    stage, moving = Stage(LayerSpec(Given, {})), MovingAttributes()
    Given.made = 0  # type: ignore[attr-defined]
    moving.look(stage, by_script=True)
    before = global_values(stage)
    stage.forward_funcs[0].counts["forwards"] = 7  # by the script, on all workers
    assert not moving.look(stage, by_script=True) and not moving.take_unsendable()
    for _ in range(2):  # what is made once is made on all workers
        assert not moving.take_unsendable()
        stage.train_once(batch(0))
        assert not moving.look(stage, by_script=False)
    named = moving.take_unsendable()
    assert [text.split(" (")[0] for text in named] == ["attribute 'counts' of layer 0", "attribute 'seen' of layer 0"]
    assert moving.state(stage, moving_only=False) is None
    after = global_values(stage)
    assert {name for name, its in after.items() if before[name] != its} == {
        "SEEN of tests.runtime.test_held_attributes",
        "made of class Given",
    }


@dataclass(frozen=True)
class Settings:
    """Never changes."""

    __slots__ = ()


class Odd(nn.Module):
    """Holds what nobody can follow."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.numbers = [nn.Linear(2, 2)], itertools.count()
        self.fine = [nn.Identity()]
        self.log, self.path = io.StringIO(), Path(__file__)
        self.settings = Settings()
        self.whole_model = self.hidden[0].forward
        self.__dict__["teacher"] = nn.Linear(2, 2)


def test_what_can_not_be_followed_is_named_at_the_first_look() -> None:
    moving = MovingAttributes()
    moving.look(Stage(LayerSpec(Odd)), by_script=True)
    assert moving.take_unsendable() == [
        "attribute 'hidden' of layer 0 (modules that are not registered)",
        "attribute 'numbers' of layer 0 (an iterator: count)",
        "attribute 'teacher' of layer 0 (modules that are not registered)",
    ]
    moving = MovingAttributes()
    moving.look(Stage(Odd()), by_script=True)
    assert len(moving.take_unsendable()) == 2, "in a layer that the script has made, its module is there everywhere"


class Slotted:
    """Counts where nobody looks."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class Configured(nn.Module):
    """Has what its LayerSpec gives it, and one of its own."""

    def __init__(self, given: Slotted) -> None:
        super().__init__()
        self.given, self.own = given, Slotted()


def test_what_a_layer_is_given_is_not_refused_whatever_it_is() -> None:
    moving = MovingAttributes()
    moving.look(Stage(LayerSpec(Configured, Slotted())), by_script=True)
    assert moving.take_unsendable() == ["attribute 'own' of layer 0 (an object with __slots__: Slotted)"]


def test_large_data_that_a_script_has_are_not_copied() -> None:
    tokens, samples = numpy.zeros(10_000_000), [[number] for number in range(5_000)]
    stage = Stage(LayerSpec(Given, {"tokens": tokens, "samples": samples}))  # type: ignore[dict-item]
    held = {id(value) for value in given_objects(stage)}
    assert id(tokens) in held and id(samples) in held and not held.intersection(map(id, samples))
    tracemalloc.start()
    given_objects(stage)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < tokens.nbytes / 2, "this process's other threads and modules take some, too"


class Script:
    """What a loss function may have from its script."""

    def __init__(self, rank: int) -> None:
        self.local_rank, self.scale, self.history = rank, 2.0, [rank]

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return outputs.square().mean() * self.scale


def test_what_a_loss_function_has_from_its_script_stays_that_of_its_worker() -> None:
    here, there = Script(rank=0), Script(rank=1)
    owner, shadow = (Stage(LayerSpec(nn.Linear, 8, 8), loss=script.loss) for script in (here, there))
    moving, other = MovingAttributes(), MovingAttributes()
    moving.look(owner, by_script=True)
    here.history.append(5)  # by the script, which does so on every worker
    assert not moving.look(owner, by_script=True)
    state = moving.state(owner, moving_only=False)
    other.accept(shadow, None if state is None else sent(state))
    assert (there.local_rank, there.history) == (1, [1])
    here.history.append(6)  # by a forward
    assert moving.look(owner, by_script=False)
    other.accept(shadow, sent(moving.state(owner)))
    assert (there.local_rank, there.history) == (1, [0, 5, 6])


def doubled(self: nn.Module, x: Tensor) -> Tensor:
    return 2 * x


def test_a_method_that_the_script_puts_in_the_place_of_another_follows() -> None:
    owner, shadow = (Stage(LayerSpec(nn.Linear, 8, 8)) for _ in range(2))
    same_weights(owner, shadow)
    moving = MovingAttributes()
    moving.look(owner, by_script=True)
    owner.forward_funcs[0].forward = types.MethodType(doubled, owner.forward_funcs[0])
    assert moving.look(owner, by_script=True)
    MovingAttributes().accept(shadow, sent(moving.state(owner)))
    assert shadow.forward_funcs[0].forward.__self__ is shadow.forward_funcs[0]
    assert torch.equal(shadow.train_once(batch(1)), 2 * batch(1))


class Plain(nn.Module):
    """A layer of the script's."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


def in_a_closure(layer: nn.Module) -> None:
    before = layer.forward
    layer.forward = lambda x: before(x) * 0.5  # type: ignore[method-assign]


def in_a_partial(layer: nn.Module) -> None:
    layer.forward = functools.partial(lambda before, x: before(x) * 0.5, layer.forward)  # type: ignore[method-assign]


def in_a_default(layer: nn.Module) -> None:
    def forward(x: Tensor, before: Callable[[Tensor], Tensor] = layer.forward) -> Tensor:
        return before(x) * 0.5

    layer.forward = forward  # type: ignore[method-assign]


def in_an_attribute(layer: nn.Module) -> None:
    def forward(layer: Any, x: Tensor) -> Tensor:
        result: Tensor = layer.forward_before(x) * 0.5
        return result

    layer.forward_before = layer.forward
    layer.forward = functools.partial(forward, layer)  # type: ignore[method-assign]


@pytest.mark.parametrize("wrap", [in_a_closure, in_a_partial, in_a_default, in_an_attribute])
def test_a_forward_that_the_script_has_wrapped_is_wrapped_once_in_a_replica(wrap: Callable[[nn.Module], None]) -> None:
    """Whatever it keeps the method of before in, and however often the owner's state is copied."""
    owner, shadow = Stage(LayerSpec(Plain)), Stage(LayerSpec(Plain))
    same_weights(owner, shadow)
    wrap(owner.forward_funcs[0])
    expected = owner.train_once(batch(1))
    for _ in range(3):
        moving = MovingAttributes()
        moving.look(owner, by_script=True)
        MovingAttributes().accept(shadow, sent(moving.state(owner, moving_only=False)))
        assert torch.equal(shadow.train_once(batch(1)), expected)


def test_stages_of_one_worker_share_nothing_that_moves() -> None:
    together: list[int] = []
    one, other = Stage(LayerSpec(KeepingBlock)), Stage(LayerSpec(KeepingBlock))
    for stage in (one, other):
        stage.forward_funcs[0].together = together
    moving = MovingAttributes()
    moving.share(one, other)
    moving.look(one, by_script=True)
    for number in range(2):
        together.append(number)
        moving.look(one, by_script=False)
    assert [text.split(" (")[0] for text in moving.take_unsendable()] == ["attribute 'together' of layer 0"]


def test_an_optimizers_slow_weights_go_with_its_stage() -> None:
    module = nn.Linear(2, 2)
    owner, shadow = Lookahead(module.parameters()), Lookahead(module.parameters())
    for slow in owner.slow:
        slow.fill_(3.0)
    accept_optimizer_values(shadow, module, optimizer_values(owner, module))
    assert all(bool((slow == 3.0).all()) for slow in shadow.slow)
    assert optimizer_values(torch.optim.AdamW(module.parameters()), module) is None


class Marked(torch.Tensor):
    """A class that no constructor of a shadow has made one of."""


def test_only_what_names_a_rank_or_a_device_is_a_workers_own() -> None:
    own = ("rank", "local_rank", "global_rank", "ranks", "device", "cuda_device", "device_id", "device_ids")
    others = ("ranked", "prank", "rank_history", "low_rank_cache", "devices_seen", "devicelike")
    assert [name for name in (*own, *others) if differs_by_machine(name)] == list(own)


def test_what_an_optimizer_keeps_and_no_other_worker_can_make_is_named() -> None:
    module = nn.Linear(2, 2)
    owner, shadow = Lookahead(module.parameters()), Lookahead(module.parameters())
    owner.marked = torch.ones(2).as_subclass(Marked)  # type: ignore[attr-defined]
    problems = accept_optimizer_values(shadow, module, optimizer_values(owner, module))
    assert len(problems) == 1 and problems[0].startswith("Lookahead.marked (a tensor of class ")
    assert not hasattr(shadow, "marked")


def test_hooks_on_an_optimizer_are_named() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 2)
    assert unfollowed_hooks(optimizer) == []
    optimizer.register_step_post_hook(lambda *_: None)
    assert len(unfollowed_hooks(optimizer)) == 1


def test_class_values_are_not_touched_by_reading() -> None:
    before = repr(ClassValues.now())
    global_values(Stage(LayerSpec(Given, {})))
    assert repr(ClassValues.now()) == before


def test_what_a_run_of_a_models_frame_finds_is_each_workers_own() -> None:
    """Layers of a Hugging Face decoder share it, and each of their forwards runs it."""
    frame = Skeleton.__new__(Skeleton)
    reader = Reader(Parts({}, {}))
    before = reader.graph.content(reader.item({"frame": frame}), [])
    frame.__dict__["_kept"] = [1, 2]
    reader = Reader(Parts({}, {}))
    assert reader.graph.content(reader.item({"frame": frame}), []) == before
    assert not reader.graph.unknown(["ref", 0])


class AttributeDict(dict[str, Any]):
    def __init__(self, **values: Any) -> None:
        super().__init__(**values)
        self.__dict__ = self


class Items(list[float]):
    pass


class Mode(enum.Enum):
    SLOW, FAST = 1, 2


class Flags(enum.Flag):
    ONE, TWO = 1, 2


class Numbered:
    """Made by a rule of its own."""

    def __new__(cls) -> Numbered:
        return super().__new__(cls)

    def __init__(self) -> None:
        self.count = 0


class Keeping(nn.Module):
    """Keeps a count in objects of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.space, self.named, self.items = types.SimpleNamespace(n=0), AttributeDict(n=0), Items([0.0])
        self.number, self.exact = Fraction(0), Decimal("0.10")
        self.raw, self.packed, self.own = bytearray(2), array.array("d", [0.0]), Numbered()
        self.mode, self.flags = Mode.SLOW, Flags.ONE

    def forward(self, x: Tensor) -> Tensor:
        self.space.n += 1
        self.named.n += 2
        self.items[0] += 3
        self.items.extend([1.0])
        self.number, self.exact = self.number + Fraction(1, 3), self.exact + Decimal("0.01")
        self.raw[0] += 4
        self.packed[0] += 5
        self.own.count += 6
        self.mode, self.flags = Mode.FAST, Flags.ONE | Flags.TWO
        return x + self.seen()[0]

    def seen(self) -> tuple[Any, ...]:
        counts = self.space.n, self.named.n, self.named["n"], list(self.items), self.raw[0], self.packed[0]
        return (*counts, self.number, self.exact, self.own.count, self.mode, self.flags)


def test_objects_of_many_kinds_go_with_their_stage() -> None:
    owner, shadow = (Stage(LayerSpec(Keeping)) for _ in range(2))
    moves, its = MovingAttributes(), MovingAttributes()
    moves.look(owner, by_script=False)
    for _ in range(2):
        owner.train_once(torch.zeros(1))
        moves.look(owner, by_script=False)
    assert moves.take_unsendable() == []
    state = decode(encode(moves.state(owner)))
    own = shadow.forward_funcs[0].own
    its.accept(shadow, state)
    assert its.take_unsendable() == [] and shadow.forward_funcs[0].own is own
    assert shadow.forward_funcs[0].seen() == owner.forward_funcs[0].seen()
    assert vars(shadow.forward_funcs[0].named) is shadow.forward_funcs[0].named
    assert torch.equal(owner.train_once(torch.zeros(1)), shadow.train_once(torch.zeros(1)))


def test_an_object_with_a_rule_of_its_own_is_not_made_where_there_is_none() -> None:
    owner, shadow = (Stage(LayerSpec(Keeping)) for _ in range(2))
    moves, its = MovingAttributes(), MovingAttributes()
    for _ in range(3):
        owner.train_once(torch.zeros(1))
        moves.look(owner, by_script=False)
    shadow.forward_funcs[0].own = None
    its.include(moves.state(owner))
    its.accept(shadow, decode(encode(moves.state(owner))))
    assert len(its.take_unsendable()) == 1
