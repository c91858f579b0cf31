"""A pipeline script whose workers hold the GIL: ``main([seconds, who, when])`` in a worker's process.

``who``: a rank or ``all``. ``when``: at the ``start``, once the engine is there; ``between`` two steps; in a ``hook``.
"""

from __future__ import annotations

import itertools
import os

import deepspeed
import torch
from deepspeed.pipe import PipelineModule

from deepspeed_bamboo.runtime.main import supervised
from tests.elastic.workers import sleep_with_the_gil

STEPS = 6
_SETTINGS = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "steps_per_print": 1000000,
    "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
}


def main(argv: list[str]) -> int:
    """Returns the worker's exit code."""
    return supervised(lambda: _train(float(argv[0]), argv[1], argv[2]))


def _train(seconds: float, who: str, when: str) -> None:
    torch.set_num_threads(1)
    rank = os.environ["RANK"]
    holds = who in ("all", rank)
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    torch.manual_seed(3)
    layers = [torch.nn.Linear(4, 4) for _ in range(4)]
    module = PipelineModule(
        layers=layers, num_stages=2, loss_fn=torch.nn.functional.mse_loss, partition_method="uniform"
    )
    bamboo = {"coordinator": {"lease_seconds": float(os.environ["TEST_LEASE_SECONDS"])}, "seed": 5}
    engine, *_ = deepspeed.initialize(
        model=module, model_parameters=list(module.parameters()), config={**_SETTINGS, "bamboo": bamboo}
    )
    batches = itertools.repeat((torch.ones(2, 4), torch.zeros(2, 4)))
    if holds and when == "start":
        sleep_with_the_gil(seconds)
    while engine.global_steps < STEPS:
        if holds and when == "hook" and engine.global_steps == 3:
            for layer in module.forward_funcs:
                layer.register_forward_pre_hook(_Once(seconds))
        engine.train_batch(batches)
        if holds and when == "between" and engine.global_steps in (2, 4):
            sleep_with_the_gil(seconds)
    print(f"digest {engine.state_digest()} in epoch {engine.epoch}", flush=True)


class _Once:
    """A hook that stands still the first time."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __call__(self, *arguments: object) -> None:
        seconds, self._seconds = self._seconds, 0.0
        if seconds:
            sleep_with_the_gil(seconds)
