"""Stock's norm and clipping on what the plugin hands it: the same bits as on what stock has itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.utils import clip_tensors_by_global_norm, get_global_norm_of_tensors

from deepspeed_bamboo.core.grid import Coordinate
from deepspeed_bamboo.runtime.stock.logical import GroupKey, LogicalGroup
from deepspeed_bamboo.runtime.stock.patches.norm_on_host import _Norms, without_norm


def optimizer(dtype: torch.dtype) -> Any:
    """What the hooks use of stock's: flat sums of two groups, with padding, and views of what has a gradient."""
    numbers = torch.Generator().manual_seed(1)
    flat = [torch.randn(size, generator=numbers).to(dtype) for size in (70, 33)]
    flat[0][60:] = 0.0  # no gradient, and padding
    views = [flat[0][:20], flat[0][20:60], flat[1]]
    stock: Any = SimpleNamespace(fp32_groups_gradients_flat=flat, views=views)
    stock.get_grads_for_norm = lambda for_clipping=False: views if for_clipping else (views, {})
    return stock


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_and_clipping_are_stocks(dtype: torch.dtype) -> None:
    plain, hooked = optimizer(dtype), optimizer(dtype)
    hooked.get_grads_for_norm = _Norms(hooked, hooked.get_grads_for_norm)
    norms = [get_global_norm_of_tensors(which.get_grads_for_norm()[0]) for which in (plain, hooked)]
    assert norms[0].item() == norms[1].item() > 1.0
    for which, norm in zip((plain, hooked), norms, strict=True):
        clip_tensors_by_global_norm(which.get_grads_for_norm(for_clipping=True), max_norm=0.5, global_norm=norm)
    for one, other in zip(plain.fp32_groups_gradients_flat, hooked.fp32_groups_gradients_flat, strict=True):
        assert torch.equal(one, other)
    assert get_global_norm_of_tensors(hooked.views).item() == pytest.approx(0.5, rel=0.01)


def test_a_stage_of_nothing_but_tied_copies_adds_nothing_to_the_norm() -> None:
    stage = optimizer(torch.float32)
    stage.get_grads_for_norm = _Norms(stage, lambda: ([], {}))
    assert get_global_norm_of_tensors(stage.get_grads_for_norm()[0]).item() == 0.0


def test_a_shadow_hands_in_one_number_and_clips_all() -> None:
    shadow = optimizer(torch.float32)
    hook = shadow.get_grads_for_norm = _Norms(shadow, shadow.get_grads_for_norm)
    first = shadow.fp32_groups_gradients_flat[0][0].abs().item()
    with without_norm(shadow):
        assert get_global_norm_of_tensors(shadow.get_grads_for_norm()[0]).item() == pytest.approx(first)
        assert len(shadow.get_grads_for_norm(for_clipping=True)) == 2
    assert shadow.get_grads_for_norm is hook


@pytest.mark.parametrize("on_host", [True, False])
def test_an_answer_takes_the_place_of_what_was_handed_in(on_host: bool) -> None:
    members = (Coordinate(0, 0), Coordinate(0, 1))
    total = torch.tensor(7.0)
    group = LogicalGroup(
        GroupKey("model", members), coordinate=members[0], exchange=lambda: lambda key, operation, tensor: total
    )
    group.answers_on_host = on_host
    number = torch.tensor(3.0)
    memory = number.data_ptr()
    group.allreduce([number])
    assert number.item() == 7.0
    assert (number.data_ptr() == memory) is not on_host, "where the answer is, or where the number was"
