"""A step of DeepSpeed's compiled Adam on a CPU depends on its arguments alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam

from deepspeed_bamboo.runtime.stock.patches.compiled_adam import make_independent_of_history

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


def test_powers_of_an_offloaded_adam_are_taken_anew_in_every_step() -> None:
    kernel = Kernel()

    def adam_update(number: int, step: int, lr: float, *further: Any) -> None:
        first, second, epsilon, decay, _, parameter, gradient, *moments = further
        kernel(number, None, [[gradient], [parameter], *moments], lr, first, second, epsilon, step, 1, 1, decay)

    optimizer = DeepSpeedCPUAdam.__new__(DeepSpeedCPUAdam)
    weight = torch.nn.Parameter(torch.zeros(2))
    defaults = {"lr": 0.1, "betas": BETAS, "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False, "bias_correction": True}
    torch.optim.Optimizer.__init__(optimizer, [weight], defaults)
    optimizer.opt_id, optimizer.fp32_optimizer_states = 3, True
    optimizer.ds_opt_adam = SimpleNamespace(adam_update=adam_update, destroy_adam=lambda number: None)
    make_independent_of_history(optimizer)
    for step in (1, 2, 3, 7, 3):
        weight.grad = torch.ones(2)
        optimizer.state[weight].update(step=step - 1, exp_avg=torch.zeros(2), exp_avg_sq=torch.zeros(2))
        optimizer.step()
    assert kernel.used == ["0.9^1", "0.9^2", "0.9^3", "0.9^7", "0.9^3"]


def test_other_optimizers_are_left_alone() -> None:
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(2))])
    make_independent_of_history(optimizer)
    assert not hasattr(optimizer, "multi_tensor_adam")
