"""A step of DeepSpeed's compiled Adam on a CPU depends on its arguments alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam

from deepspeed_bamboo.runtime.stock.patches.compiled_adam import _last_step_with_powers, make_independent_of_history

BETAS = (0.9, 0.999)


class Kernel:
    """Remembers what DeepSpeed's C++ does, and records the power that each step with an effect would use."""

    def __init__(self) -> None:
        self.step, self.betas, self.power = 0, (0.0, 0.0), "1"
        self.used: list[str] = []

    def __call__(self, chunk: int, overflow: Any, tensors: Any, lr: float, *further: Any) -> None:
        betas, step = further[:2], further[3]
        if betas != self.betas or step not in (self.step, self.step + 1):
            self.power = f"{betas[0]}^{step}"
        elif step == self.step + 1:
            self.power = f"({self.power}) * {betas[0]}"
        self.step, self.betas = step, betas
        if tensors[0][0].any():
            self.used.append(self.power)


def compiled_adam(kernel: Kernel) -> FusedAdam:
    optimizer = FusedAdam.__new__(FusedAdam)
    torch.optim.Optimizer.__init__(optimizer, [torch.nn.Parameter(torch.zeros(2))], {"lr": 0.1})
    optimizer.multi_tensor_adam = kernel
    return optimizer


def test_powers_are_taken_anew_in_every_step() -> None:
    kernel = Kernel()
    optimizer = compiled_adam(kernel)
    make_independent_of_history(optimizer)
    for step in (1, 2, 3, 7, 3):
        optimizer.multi_tensor_adam(1, None, [[torch.ones(2)]] * 4, 0.1, *BETAS, 1e-8, step, 1, 1, 0.0)
    assert kernel.used == ["0.9^1", "0.9^2", "0.9^3", "0.9^7", "0.9^3"]


def offloaded_adam(kernel: Kernel, *groups: dict[str, Any]) -> DeepSpeedCPUAdam:
    """With a compiled part that records what DeepSpeed's would do."""

    def adam_update(number: int, step: int, lr: float, *further: Any) -> None:
        first, second, epsilon, decay, _, parameter, gradient, *moments = further
        kernel(number, None, [[gradient], [parameter], *moments], lr, first, second, epsilon, step, 1, 1, decay)

    optimizer = DeepSpeedCPUAdam.__new__(DeepSpeedCPUAdam)
    made = [{"params": [torch.nn.Parameter(torch.zeros(2))], **group} for group in groups or ({},)]
    defaults = {"lr": 0.1, "betas": BETAS, "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False, "bias_correction": True}
    torch.optim.Optimizer.__init__(optimizer, made, defaults)
    optimizer.opt_id, optimizer.fp32_optimizer_states = 3, True
    optimizer.ds_opt_adam = SimpleNamespace(adam_update=adam_update, destroy_adam=lambda number: None)
    return optimizer


def take(optimizer: DeepSpeedCPUAdam, *steps: int) -> None:
    for step in steps:
        for group in optimizer.param_groups:
            for weight in group["params"]:
                weight.grad = torch.ones(2)
                optimizer.state[weight].update(step=step - 1, exp_avg=torch.zeros(2), exp_avg_sq=torch.zeros(2))
        optimizer.step()


def product(step: int) -> str:
    return "0.9^1" if step == 1 else f"({product(step - 1)}) * 0.9"


def test_an_offloaded_adam_has_the_powers_of_one_that_took_all_steps_from_the_first() -> None:
    kernel = Kernel()
    optimizer = offloaded_adam(kernel)
    make_independent_of_history(optimizer)
    take(optimizer, 1, 2, 3, 3, 7, 3)
    assert kernel.used == [product(step) for step in (1, 2, 3, 3, 7, 3)]


def test_steps_without_effect_come_before_the_first_step_only() -> None:
    kernel = Kernel()
    calls = 0

    def counted(*arguments: Any) -> None:
        nonlocal calls
        calls += 1
        kernel(*arguments)

    optimizer = offloaded_adam(counted)  # type: ignore[arg-type]
    make_independent_of_history(optimizer)
    take(optimizer, 5)
    assert calls == 1 + 4 + 1, "other betas, four steps before, its own"
    take(optimizer, 6, 7)
    assert calls == 6 + 2
    assert kernel.used == [product(step) for step in (5, 6, 7)]


def test_steps_whose_powers_no_longer_matter_are_not_repeated() -> None:
    one = torch.ones((), dtype=torch.float32)
    step = _last_step_with_powers(BETAS)
    assert step < 20_000
    by_products = torch.full((step,), BETAS[1], dtype=torch.float32).cumprod(0)[-1]
    assert one - by_products == one and one - torch.tensor(BETAS[1] ** step, dtype=torch.float32) == one
    kernel = Kernel()
    optimizer = offloaded_adam(kernel)
    make_independent_of_history(optimizer)
    take(optimizer, step + 1)
    assert kernel.used == [f"0.9^{step + 1}"]
    assert _last_step_with_powers((0.0, 0.0)) == 0


def test_powers_of_betas_that_change_are_computed_again_in_each_step() -> None:
    kernel = Kernel()
    optimizer = offloaded_adam(kernel)
    make_independent_of_history(optimizer)
    (group,) = optimizer.param_groups
    take(optimizer, 1, 2)
    group["betas"] = (0.8, 0.999)  # as a cycle of momentum sets them
    take(optimizer, 3, 4)
    group["betas"] = BETAS
    take(optimizer, 5)
    assert kernel.used == [product(1), product(2), "0.8^3", "0.8^4", product(5)]


def test_so_are_those_of_groups_with_betas_of_their_own() -> None:
    kernel = Kernel()
    optimizer = offloaded_adam(kernel, {}, {"betas": (0.8, 0.999)})
    make_independent_of_history(optimizer)
    take(optimizer, 1, 2)
    assert kernel.used == ["0.9^1", "0.8^1", "0.9^2", "0.8^2"]
    optimizer.param_groups[1]["betas"] = BETAS
    take(optimizer, 3)
    assert kernel.used[-2:] == [product(3), product(3)]


@pytest.mark.sweep  # the first use compiles for a minute
def test_an_offloaded_adam_is_equal_to_deepspeeds_and_so_is_one_that_continues_it() -> None:
    stock, wrapped, later = (DeepSpeedCPUAdam([torch.nn.Parameter(torch.ones(99))], betas=(0.9, 0.99)) for _ in "123")
    for optimizer in (wrapped, later):
        make_independent_of_history(optimizer)
    for step in range(1, 13):
        gradient = torch.randn(99, generator=torch.Generator().manual_seed(step))
        if step == 7:
            copy_state(wrapped, to=later)
        for optimizer in (stock, wrapped) if step < 7 else (stock, wrapped, later):
            optimizer.param_groups[0]["params"][0].grad = gradient.clone()
            optimizer.step()
        weights = [one.param_groups[0]["params"][0] for one in (stock, wrapped, later)]
        assert torch.equal(weights[0], weights[1]), step
        assert step < 7 or torch.equal(weights[0], weights[2]), step


def copy_state(optimizer: DeepSpeedCPUAdam, *, to: DeepSpeedCPUAdam) -> None:
    (weight,), (copied,) = optimizer.param_groups[0]["params"], to.param_groups[0]["params"]
    copied.data.copy_(weight.data)
    to.state[copied].update(
        {name: value.clone() if torch.is_tensor(value) else value for name, value in optimizer.state[weight].items()}
    )


def test_other_optimizers_are_left_alone() -> None:
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(2))])
    make_independent_of_history(optimizer)
    assert not hasattr(optimizer, "multi_tensor_adam")
