"""What a redundant forward keeps: once each, and as it was."""

from __future__ import annotations

import torch

from deepspeed_bamboo.runtime.offload import SavedTensor, SharedCopies


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


def test_parts_are_copied_alone_and_once() -> None:
    copies, made = recording()
    tensor = torch.randn(4, 6)
    for part in (tensor[1:], tensor[:1], tensor[1:]):
        assert same(copies.of(part), part)
    assert [len(copy) for copy in made] == [3, 1]


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
