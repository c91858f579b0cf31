"""Tensors lie in a replica's memory as in its owner's, or kernels would give other last bits."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from deepspeed_bamboo.core.replica_differences import differences
from deepspeed_bamboo.runtime.comm.encoding import decode, encode
from deepspeed_bamboo.runtime.comm.layout import empty_in_layout, in_layout, is_layout, layout_of
from deepspeed_bamboo.runtime.iteration.executor import _detached
from deepspeed_bamboo.runtime.iteration.offload import SharedCopies
from deepspeed_bamboo.runtime.iteration.pinned import PinnedMemory
from deepspeed_bamboo.runtime.iteration.supply import _form, _value
from deepspeed_bamboo.runtime.recovery.stage_state import _keep_forms
from deepspeed_bamboo.runtime.stock.likeness import lay_out, liken
from tests.runtime import models
from tests.runtime.jobs import Jobs
from tests.runtime.scenarios import Training, build_module
from tests.runtime.test_likeness import CPU, Stage, described
from tests.runtime.test_losses import kill


@st.composite
def dense_tensors(draw: st.DrawFn) -> Tensor:
    """Of every order of dimensions, some of size 1."""
    shape = draw(st.lists(st.integers(1, 4), max_size=4))
    order = draw(st.permutations(range(len(shape))))
    return torch.rand([shape[d] for d in order]).permute([order.index(d) for d in range(len(shape))])


@given(dense_tensors())
def test_tensors_arrive_with_the_strides_that_they_had(tensor: Tensor) -> None:
    for found in (
        decode(encode([tensor]))[0],
        in_layout(tensor.contiguous(), layout_of(tensor)),
        _value(_form(tensor, sent := [], where=""), [t.contiguous() for t in sent]),
    ):
        assert found.stride() == tensor.stride() and torch.equal(found, tensor)


@given(dense_tensors())
def test_what_is_one_tensors_layout_is_a_layout(tensor: Tensor) -> None:
    assert is_layout(tensor.shape, tensor.stride())
    made = empty_in_layout(tensor.shape, layout_of(tensor), dtype=tensor.dtype, device=CPU)
    assert made.stride() == tensor.stride()


@pytest.mark.parametrize(
    ("shape", "strides"),
    [((2, 3), (4, 1)), ((2, 3), (1, 1)), ((2,), (-1,)), ((3,), (0,)), ((2, 3), (3,)), ((0,), (1,))],
)
def test_gaps_and_overlaps_are_no_layout(shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    assert not is_layout(shape, strides)


def test_tensors_with_gaps_arrive_contiguous() -> None:
    tensor = torch.rand(4, 6)[:, ::2]
    assert layout_of(tensor) is None
    found = decode(encode(tensor))
    assert torch.equal(found, tensor) and found.is_contiguous()


def images_stage() -> Stage:
    return Stage(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)))


def test_a_replica_has_its_owners_memory_format() -> None:
    owner, replica = images_stage().to(memory_format=torch.channels_last), images_stage()
    assert any("strides" in each for each in differences(described(owner), described(replica)))
    liken(replica, described(owner), examples=[owner], device=CPU)
    lay_out(replica, described(owner))
    assert differences(described(owner), described(replica)) == ()
    assert replica.get_parameter("0.0.weight").is_contiguous(memory_format=torch.channels_last)


def test_a_parameter_with_a_number_called_stride_is_described_copied_and_made_again() -> None:
    """Megatron's and gpt-neox's layers give theirs one, which hides torch's method."""
    owner, replica = images_stage().to(memory_format=torch.channels_last), images_stage()
    for parameter in owner.parameters():
        parameter.stride = 1  # type: ignore[assignment,method-assign]
    liken(replica, described(owner), examples=[owner], device=CPU)
    lay_out(replica, described(owner))
    assert differences(described(owner), described(replica)) == ()
    weight = replica.get_parameter("0.0.weight")
    assert weight.stride == 1 and weight.is_contiguous(memory_format=torch.channels_last)
    room = PinnedMemory(block_bytes=1, pinned=False).like(weight)
    assert room.is_contiguous(memory_format=torch.channels_last)
    saved = SharedCopies(torch.clone).of(weight)
    assert torch.equal(saved.restore(saved.copy), weight)


def test_the_optimizers_state_lies_in_memory_as_its_parameter_does() -> None:
    weight = nn.Parameter(torch.rand(4, 3, 2, 2).contiguous(memory_format=torch.channels_last))
    optimizer = torch.optim.Adam([weight])
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    as_sent = {name: value.contiguous() for name, value in optimizer.state[weight].items()}
    optimizer.state[weight].update(as_sent)
    _keep_forms(optimizer, {0: as_sent})
    assert optimizer.state[weight]["exp_avg"].stride() == weight.stride()
    assert torch.equal(optimizer.state[weight]["exp_avg"], as_sent["exp_avg"])


def test_a_stage_gives_contiguous_tensors_also_to_one_on_the_same_worker() -> None:
    given_on = _detached((torch.rand(2, 3).t(), torch.rand(4)))
    assert [tensor.is_contiguous() for tensor in given_on] == [True, True]


class Picture(nn.Module):
    """A convolution whose output is given on transposed."""

    def __init__(self, name: str, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, 4, 3, padding=1)
        with torch.no_grad():
            for parameter in self.conv.parameters():
                parameter.copy_(torch.rand(parameter.shape, generator=models.generator(name)) - 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.conv(x)).transpose(2, 3)


class Flat(Picture):
    """Takes its input apart as only a contiguous one can be."""

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.view(x.shape[0], -1).view(x.shape)).mean(dim=(1, 2))


def pictures(pipeline: int, step: int, *, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Micro-batches of a loader that reads height, width, channels."""
    for number in itertools.count(step * count):
        values = torch.rand(2, 6, 6, 3, generator=models.generator("picture", pipeline, number))
        yield values.permute(0, 3, 1, 2), values.mean(dim=(2, 3))


def train_pictures(training: Training, only_ends: bool = False) -> dict[str, Any]:
    """In channels_last; ``only_ends``: only first and last ranks have data."""
    layers = [LayerSpec(Picture, "a", 3), LayerSpec(Picture, "b", 4), LayerSpec(Flat, "c", 4)]

    def make_module() -> PipelineModule:
        return PipelineModule(layers, num_stages=3, loss_fn=models.squared_error, partition_method="uniform")

    engine = build_module(training, make_module)
    engine.module.to(memory_format=torch.channels_last)  # DeepSpeed can't broadcast such weights
    data = pictures(0, 0, count=training.micro_batches)
    has = not only_ends or engine.is_first_stage() or engine.is_last_stage()
    if not only_ends:
        engine.set_data_source(lambda pipeline, step: pictures(pipeline, step, count=training.micro_batches))
    losses = [float(engine.train_batch(data if has else None)) for _ in range(training.steps)]
    result = {"losses": losses, "digest": engine.state_digest()}
    engine.close()
    return result


@pytest.mark.sweep
@pytest.mark.parametrize("mode", ["lazy", "eager", "full"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_models_in_channels_last_lose_a_stage(jobs: Jobs, mode: str, stage: int) -> None:
    bamboo = {"redundancy": {"mode": mode}, "debug_check_shadows": 1}
    case = Training("pictures", 3, bamboo=bamboo, steps=4, faults=[], settings={"gradient_clipping": 0.1})
    plain = jobs.run(train_pictures, world=3, training=case)
    killed = dataclasses.replace(case, name="pictures-killed", faults=[kill(1, 0, stage, "backward", 1)])
    result = jobs.run(train_pictures, world=3, training=killed)
    assert len(result.survivors) == 2, result.transcript()
    for what in ("losses", "digest"):
        assert result.common(what) == plain.common(what)


@pytest.mark.sweep
def test_data_in_channels_last_are_supplied_as_they_are(jobs: Jobs) -> None:
    case = Training("supplied", 3, steps=4, faults=[])
    plain = jobs.run(train_pictures, world=3, training=case, only_ends=True)
    killed = dataclasses.replace(case, name="supplied-killed", faults=[kill(1, 0, 2, "backward", 1)])
    result = jobs.run(train_pictures, world=3, training=killed, only_ends=True)
    assert len(result.survivors) == 2, result.transcript()
    assert result.common("digest") == plain.common("digest")


@pytest.mark.sweep
@pytest.mark.parametrize("workers", [1, 2])
def test_models_in_channels_last_on_fewer_workers_than_stages(jobs: Jobs, workers: int) -> None:
    case = Training("few", 3, steps=3, faults=[])
    plain = jobs.run(train_pictures, world=3, training=case)
    few = jobs.run(train_pictures, world=workers, training=dataclasses.replace(case, name="few-workers"))
    assert few.common("digest") == plain.common("digest")
    assert few.common("losses") == plain.common("losses")
