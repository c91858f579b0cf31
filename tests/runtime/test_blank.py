"""Parameters that are overwritten anyway are not drawn; everything else is what it would be."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from deepspeed_bamboo.runtime.stock.blank import BlankParameters


class Projection(nn.Module):
    """Keeps a random matrix as an attribute and another as a buffer, beside a drawn parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4, 4), 7.0))
        nn.init.kaiming_uniform_(self.weight)
        self.fixed = torch.empty(4, 4).normal_()
        self.register_buffer("scale", torch.rand(4))


def test_parameters_stay_and_other_tensors_are_drawn() -> None:
    torch.manual_seed(3)
    with BlankParameters():
        blank = Projection()
    assert torch.equal(blank.weight, torch.full((4, 4), 7.0))
    torch.manual_seed(3)
    drawn = torch.empty(4, 4).normal_()
    assert torch.equal(blank.fixed, drawn)
    assert torch.equal(blank.scale, torch.rand(4))


@pytest.mark.parametrize(
    "initialize",
    [
        lambda p: p.normal_(),
        lambda p: nn.init.normal_(p),
        lambda p: nn.init.xavier_uniform_(tensor=p),
        lambda p: nn.init.trunc_normal_(p),
    ],
    ids=["method", "normal", "by-name", "truncated"],
)
def test_no_initializer_touches_a_parameter(initialize: object) -> None:
    parameter = nn.Parameter(torch.full((3, 3), 2.0))
    state = torch.get_rng_state()
    with torch.no_grad(), BlankParameters():
        initialize(parameter)  # type: ignore[operator]
    assert torch.equal(parameter, torch.full((3, 3), 2.0))
    assert torch.equal(torch.get_rng_state(), state)
    with torch.no_grad():
        initialize(parameter)  # type: ignore[operator]
    assert not torch.equal(parameter, torch.full((3, 3), 2.0))
