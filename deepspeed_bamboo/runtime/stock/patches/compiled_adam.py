"""DeepSpeed's compiled Adams on a CPU, made to depend on nothing but their arguments.

FusedAdam keeps the powers of its betas in one object for the whole process, DeepSpeedCPUAdam (with offload_optimizer)
in one for each optimizer: continued by a product from step to step, or computed again after a gap. So the last bits of
a step depend on what was stepped before, and a replica that was rebuilt after a loss would differ from its owner. The
kernel for GPUs keeps nothing.
"""

from __future__ import annotations

import math
import weakref
from typing import Any

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam

Betas = tuple[float, float]


def make_independent_of_history(optimizer: Any) -> None:
    """Make every step of ``optimizer`` depend on its arguments alone, if it is a compiled Adam on a CPU."""
    if isinstance(optimizer, DeepSpeedCPUAdam):
        optimizer.ds_opt_adam = _AsFromTheFirstStep(optimizer.ds_opt_adam, optimizer)
        return
    if not isinstance(optimizer, FusedAdam):
        return
    if any(parameter.device.type != "cpu" for group in optimizer.param_groups for parameter in group["params"]):
        return
    compiled = optimizer.multi_tensor_adam
    nothing = [[torch.zeros(1)] for _ in range(4)]  # gradient, parameter and moments of a step without effect

    def step(chunk_size: int, overflow: Any, tensors: Any, lr: float, *betas_and_further: Any) -> Any:
        epsilon, _, mode = betas_and_further[2:5]
        compiled(chunk_size, overflow, nothing, lr, 0.0, 0.0, epsilon, 1, mode, 0, 0.0)
        return compiled(chunk_size, overflow, tensors, lr, *betas_and_further)

    optimizer.multi_tensor_adam = step


class _AsFromTheFirstStep:
    """DeepSpeedCPUAdam's compiled part, with the powers that it has where every step from the first was its own.

    Those of a job that was never stopped, then. Where the object comes from elsewhere, steps without effect bring it
    there. Betas that differ between groups, or that are no longer those that the optimizer was made with, have
    powers that are computed again in each step, as DeepSpeed has them where betas change from call to call.
    """

    def __init__(self, compiled: Any, optimizer: DeepSpeedCPUAdam) -> None:
        self._compiled = compiled
        self._optimizer = weakref.ref(optimizer)  # whose end has the compiled object destroyed
        self._nothing = [torch.zeros(1) for _ in range(4)]
        self._last: tuple[Betas, int] | None = None  # None: unknown

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compiled, name)

    def adam_update(self, number: int, step: int, lr: float, *further: Any) -> Any:
        """As DeepSpeed's: betas, epsilon, weight decay, whether bias is corrected, and four tensors follow."""
        step, betas, last = int(step), (further[0], further[1]), self._last
        steady = self._is_steady(betas)
        self._last = None
        if not steady or last not in ((betas, step - 1), (betas, step)):
            self._without_effect(number, 1, 0.0, 0.0, *further[2:5])  # other betas, so powers are computed again
            for earlier in range(1, step) if steady and step <= _last_step_with_powers(betas) else ():
                self._without_effect(number, earlier, *further[:5])
        result = self._compiled.adam_update(number, step, lr, *further)
        self._last = (betas, step) if steady else None
        return result

    def _is_steady(self, betas: Betas) -> bool:
        optimizer = self._optimizer()
        if optimizer is None:
            return False
        known = [tuple(group["betas"]) for group in (optimizer.defaults, *optimizer.param_groups)]
        return all(one == betas for one in known)

    def _without_effect(self, number: int, step: int, *values: Any) -> None:
        first, second, epsilon, _, corrects_bias = values
        self._compiled.adam_update(number, step, 0.0, first, second, epsilon, 0.0, corrects_bias, *self._nothing)


def _last_step_with_powers(betas: Betas) -> int:
    """After it 1 minus each power is 1 in fp32, however the power was computed."""
    return max((math.ceil(-26 * math.log(2) / math.log(beta)) for beta in betas if 0 < beta < 1), default=0)
