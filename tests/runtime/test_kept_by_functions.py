"""What functions of the script keep of the optimizers that they make stays what their first call made."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from deepspeed_bamboo.runtime.stock.kept_by_functions import kept_from_before

CURRENT: Any = None
BY_NAME: dict[str, Any] = {}


def made() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)


def into_a_global() -> None:
    global CURRENT
    CURRENT = BY_NAME["one"] = made()


class Owner:
    held: Any = None
    calls = 0

    def make(self) -> None:
        self.held = made()
        self.calls += 1


def keeps(function: Any, look: Callable[[], Any]) -> None:
    function()
    first = look()
    with kept_from_before(function, None, first):
        function()
        assert look() is not first
    assert look() is first and isinstance(first, torch.optim.Optimizer)


def test_the_first_stays_wherever_a_function_puts_it() -> None:
    owner, closed, options = Owner(), None, SimpleNamespace(held=None)

    def into_a_closure() -> None:
        nonlocal closed
        closed = made()

    def into(place: SimpleNamespace) -> None:
        place.held = made()

    keeps(into_a_global, lambda: CURRENT)
    keeps(into_a_global, lambda: BY_NAME["one"])
    keeps(owner.make, lambda: owner.held)
    keeps(into_a_closure, lambda: closed)
    keeps(functools.partial(into, options), lambda: options.held)


def test_what_is_no_optimizer_is_the_functions_own_business() -> None:
    owner = Owner()
    owner.make()
    with kept_from_before(owner.make):
        owner.make()
    assert owner.calls == 2
