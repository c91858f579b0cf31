"""What scripts set by hand before a step, beside parameter groups; by name, for ``train_remembering``."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable
from typing import Any

import torch
from deepspeed.pipe import PipelineModule

ONCE = 6
"""Before which step those that do it once do it."""
LATE = 9
PACE = 0
"""A global variable that a forward reads."""
OWN: list[PipelineModule] = []
"""What the script has made and given to ``initialize``."""


class Scaled(PipelineModule):
    """Its forward multiplies by what the script sets on it, of several kinds."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        OWN[:] = [self]
        self.factors, self.mask, self.shift = (1.0,), torch.ones(1), 0.0
        self.bend = functools.partial(torch.mul, other=1.0)

    def forward(self, x: Any) -> Any:
        return (
            self.bend(super().forward(x * self.factors[0] * self.mask) + self.shift) * getattr(self, "late", (1.0,))[0]
        ) * (1 + 0.1 * PACE)


def clip(engine: Any, step: int) -> None:
    engine.optimizer.clip_grad = 0.01 * (1 + step % 4)


def rate(engine: Any, step: int) -> None:
    engine.optimizer.param_groups[0]["lr"] = 0.1 * (1 + step % 4)


def scale(engine: Any, step: int) -> None:
    engine.optimizer.cur_scale = (0.3, 500.7, 0.1, 77.7, 0.013)[step % 5]


def override(engine: Any, step: int) -> None:
    engine.optimizer.override_loss_scale((0.3, 500.7, 0.1, 77.7, 0.013)[step % 5])


def root(engine: Any, step: int) -> None:
    module = engine.module
    module.factors, module.mask = (1 - 0.05 * step,), torch.full((1,), 1 - 0.02 * step)
    module.bend = functools.partial(torch.mul, other=1 + 0.03 * step)
    module.set_checkpoint_interval(step % 3)


def own(engine: Any, step: int) -> None:
    """On the script's own variable, whose stage may be elsewhere."""
    [module] = OWN
    module.factors, module.shift = (1 - 0.05 * step,), 0.01 * step
    if step == LATE:
        module.register_forward_hook(shrink)


def shrink(module: Any, inputs: Any, output: Any) -> Any:
    return output * 0.9


def number(engine: Any, step: int) -> None:
    engine.module.shift = 0.1 * step


def pace(engine: Any, step: int) -> None:
    global PACE
    PACE = step


def late(engine: Any, step: int) -> None:
    if step >= ONCE:
        engine.module.late = (0.5 + 0.1 * step,)


def weights(engine: Any, step: int) -> None:
    with torch.no_grad():
        for parameter in engine.module.parameters():
            parameter.mul_(0.5)


def share(engine: Any, step: int) -> None:
    """Changes weights; then the workers of the first two stages are lost, while the others ask for something."""
    weights(engine, step)
    if engine.stage_id < 2:
        os.kill(os.getpid(), signal.SIGKILL)
    torch.distributed.all_reduce(torch.ones(1))


def once(sets: Callable[[Any, int], None]) -> Callable[[Any, int], None]:
    """Only before one step."""

    def only(engine: Any, step: int) -> None:
        if step == ONCE:
            sets(engine, step)

    return only


SETS: dict[str, Callable[[Any, int], None]] = {
    **{each.__name__: each for each in (clip, rate, scale, override, root, own, number, late, pace)},
    **{f"{each.__name__} once": once(each) for each in (clip, scale, override, root, weights, share)},
}
