"""What a redundant forward keeps: once each, and as it was. Which ones are put off while copies are on their way."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepspeed_bamboo.config.section import RedundancyConfig
from deepspeed_bamboo.core.grid import Coordinate
from deepspeed_bamboo.core.progress import CoordinateProgress
from deepspeed_bamboo.runtime.iteration.offload import HostOffload, SavedTensor, SharedCopies
from deepspeed_bamboo.runtime.iteration.pinned import PinnedMemory
from deepspeed_bamboo.runtime.iteration.redundant_forwards import RedundantForwards
from tests.runtime.jobs import Jobs
from tests.runtime.scenarios import Training, train_and_train_leaving_out
from tests.runtime.test_losses import CLIPPED, kill


def recording() -> tuple[SharedCopies, list[torch.Tensor]]:
    made: list[torch.Tensor] = []

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        made.append(tensor.clone())
        return made[-1]

    return SharedCopies(copy), made


def same(saved: SavedTensor, tensor: torch.Tensor) -> bool:
    restored = saved.restore(saved.copy)
    return torch.equal(restored, tensor) and restored.stride() == tensor.stride()


def test_views_of_all_of_one_memory_share_a_copy() -> None:
    copies, made = recording()
    tensor = torch.randn(4, 6)
    for view in (tensor, tensor.t(), tensor.view(2, 12), tensor.detach()):
        assert same(copies.of(view), view)
    assert len(made) == 1


def test_small_parts_are_copied_alone_and_once() -> None:
    copies, made = recording()
    tensor = torch.randn(8, 6)
    for part in (tensor[1:2], tensor[:1], tensor[1:2]):
        assert same(copies.of(part), part)
    assert [len(copy) for copy in made] == [1, 1]


BACKING = torch.randn(40, 6, 8)
PARTS = {
    "with gaps": BACKING[:, 0],
    "with gaps, not from the beginning": BACKING[:, 1, 3:],
    "with gaps, transposed": BACKING[:3, :, ::4].transpose(0, 1),
    "without gaps, not from the beginning": BACKING[1, 1],
    "expanded": BACKING[3:4, :, 2].expand(5, 6),
    "overlapping": BACKING[5, 2].unfold(0, 3, 1),
    "one number": BACKING[7, 1, 1],
    "nothing": BACKING[3:3, 2],
}


@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_small_parts_lie_as_they_did_in_the_memory_that_they_come_back_to(
    part: torch.Tensor, dtype: torch.dtype
) -> None:
    """The copy on the host has no gaps; a kernel sees the strides, and how addresses are aligned."""
    part = BACKING.to(dtype).as_strided(part.size(), part.stride(), part.storage_offset())
    kept: list[torch.Tensor] = []

    def copy(tensor: torch.Tensor) -> int:
        kept.append(torch.empty_like(tensor).copy_(tensor).contiguous())
        return len(kept) - 1

    saved = SharedCopies(copy).of(part)
    restored = saved.restore(kept[saved.copy])
    assert not saved.whole and torch.equal(restored, part) and restored.stride() == part.stride()
    line = 256 // part.element_size()
    assert part.numel() == 0 or restored.storage_offset() % line == part.storage_offset() % line
    assert saved.restore(part) is part, "still on the device, as it was"


def test_large_parts_share_a_copy_without_gaps() -> None:
    copies, made = recording()
    joined = torch.randn(2, 5, 12)  # samples x positions x (queries, keys, values)
    for part in joined.split(4, dim=-1):
        heads = part.view(2, 5, 2, 2).transpose(1, 2)
        assert same(copies.of(heads), heads)
        assert copies.of(heads).restore(made[0]).storage_offset() == heads.storage_offset()
    assert [copy.is_contiguous() and copy.numel() for copy in made] == [120]


def test_memory_read_as_another_type_is_copied_for_each() -> None:
    copies, made = recording()
    tensor = torch.zeros(6, dtype=torch.int16)
    assert same(copies.of(tensor), tensor)
    assert same(copies.of(tensor.view(torch.int32)), tensor.view(torch.int32))
    assert same(copies.of(tensor.view(torch.uint8)[1:]), tensor.view(torch.uint8)[1:])
    assert [copy.numel() for copy in made] == [6, 3, 12]


def test_changed_in_place_is_copied_again() -> None:
    copies, made = recording()
    tensor = torch.randn(4)
    before, first = tensor.clone(), copies.of(tensor)
    tensor.add_(1)
    assert same(copies.of(tensor), tensor)
    assert same(first, before)
    assert len(made) == 2


def test_memory_used_again_is_not_taken_for_what_was_there() -> None:
    copies, _ = recording()
    for value in range(50):
        tensor = torch.full((1000,), float(value))
        assert same(copies.of(tensor), tensor)
        del tensor


def test_gradients_are_those_without_copies() -> None:
    copies, _ = recording()
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    x = torch.randn(2, 3, 8)
    layer(x).square().sum().backward()
    expected = [parameter.grad.clone() for parameter in layer.parameters()]
    layer.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(copies.of, lambda saved: saved.restore(saved.copy)):
        output = layer(x).square().sum()
    output.backward()
    assert all(torch.equal(p.grad, e) for p, e in zip(layer.parameters(), expected, strict=True))


def test_memory_is_given_out_without_overlap_and_again_after_it_was_taken_back() -> None:
    memory = PinnedMemory(block_bytes=1024, pinned=False)
    tensors = [
        torch.randn(7),
        torch.randn(3, 5).t(),  # its strides are kept
        torch.arange(40, dtype=torch.int16),
        torch.randn(1000, dtype=torch.float64),  # larger than a block
        torch.tensor(3.0),
        torch.randn(100, dtype=torch.bfloat16),
    ]
    for _ in range(3):
        rooms = [memory.like(tensor) for tensor in tensors]
        for room, tensor in zip(rooms, tensors, strict=True):
            room.copy_(tensor)
        for room, tensor in zip(rooms, tensors, strict=True):
            assert torch.equal(room, tensor) and room.dtype == tensor.dtype and room.stride() == tensor.stride()
        assert memory.reserved_bytes == 1024 + 8000 + 1024
        memory.take_back()


@pytest.mark.parametrize(
    ("settings", "stage", "busy", "expected"),
    [
        ({"mode": "eager"}, 1, False, 2),  # the oldest that is left, not the fourth, which the program has there
        ({"mode": "eager"}, 1, True, None),
        ({"mode": "eager"}, 2, False, None),
        ({"mode": "auto"}, 1, True, None),
        ({"mode": "eager", "offload": "none"}, 2, False, 2),
        ({"mode": "eager", "overlap": True}, 2, True, 2),
        ({"mode": "full"}, 2, True, 2),
    ],
)
def test_optional_redundant_forwards_wait_for_earlier_copies_and_spare_the_last_stage(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], stage: int, busy: bool, expected: int | None
) -> None:
    monkeypatch.setattr(HostOffload, "copies", True)
    monkeypatch.setattr(HostOffload, "busy", busy)
    forwards = RedundantForwards(RedundancyConfig(**settings), device=torch.device("cpu"))  # nothing is really copied
    replica = SimpleNamespace(
        progress=CoordinateProgress(loaded=4, forwards=2),
        coordinate=Coordinate(0, stage),
        attributes={"grid": SimpleNamespace(pipe_parallel_size=3)},
    )
    assert forwards.due(replica, 3) == expected  # type: ignore[arg-type]


def test_whatever_was_put_off_a_loss_changes_no_number(jobs: Jobs) -> None:
    training = Training(
        "put-off",
        4,
        steps=5,
        micro_batches=8,
        dropout=0.3,
        layers="averaged",
        settings=CLIPPED,
        bamboo={"redundancy": {"mode": "eager"}},
    )
    losses = [kill(1, 0, 1, "backward", 2), kill(2, 0, 3, "forward", 5), kill(3, 0, 0, "backward", 6)]
    undisturbed = dataclasses.replace(training, name="put-off-whole", faults=[])
    killed = dataclasses.replace(training, name="put-off-killed", faults=losses)
    result = jobs.run(train_and_train_leaving_out, world=4, undisturbed=undisturbed, killed=killed)
    assert result.codes.count(-9) == len(losses), result.transcript()
    values = result.values[result.survivors[0]]
    for what in ("losses", "steps", "norm", "digest"):
        assert values[killed.name][what] == values[undisturbed.name][what], what
    for what in ("put_off", "done"):
        assert sum(result.values[rank][killed.name].get(what, 0) for rank in result.survivors) > 0, what
