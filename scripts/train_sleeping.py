"""Trains a pipeline of layers that sleep, a layer a stage, to measure how work is shared; see bench_balance.py.

    deepspeed --num_accelerators 3 --module deepspeed_bamboo.launch scripts/train_sleeping.py \\
        --deepspeed_config CONFIG --seconds 0.01 0.01 0.02 --steps 20 --event-log runs/asleep
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import Tensor

from deepspeed_bamboo.config.section import SECTION, load_deepspeed_settings
from deepspeed_bamboo.eventlog.run_log import RunLog
from deepspeed_bamboo.models.sleeping import WIDTH, SleepingLayer


def main(
    argv: Sequence[str] | None = None,
    *,
    between_steps: Callable[[Any], Callable[[], None]] = lambda engine: lambda: None,
) -> int:
    """Train as ``argv`` says. Returns the exit code. ``between_steps(engine)`` is called before every step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deepspeed_config", required=True)
    parser.add_argument("--seconds", type=float, nargs="+", required=True, help="of a forward, for each stage")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--event-log", type=Path, required=True)
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    torch.manual_seed(1)
    deepspeed.init_distributed()
    settings = load_deepspeed_settings(arguments.deepspeed_config)
    settings[SECTION] = {**settings[SECTION], "event_log": str(arguments.event_log)}
    model = PipelineModule(
        layers=[LayerSpec(SleepingLayer, seconds) for seconds in arguments.seconds],
        num_stages=len(arguments.seconds),
        partition_method="uniform",
        loss_fn=torch.nn.functional.mse_loss,
    )
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=settings)
    log = RunLog(engine, directory=arguments.event_log, barrier=dist.barrier)
    if hasattr(engine, "set_data_source"):
        # A worker that comes late, or goes back to a checkpoint, has the micro-batches of any step.
        count = engine.gradient_accumulation_steps()
        engine.set_data_source(lambda pipeline, step: _micro_batches(first=step * count))
    loss, data, prepare = None, _micro_batches(), between_steps(engine)
    while engine.global_steps < arguments.steps and not getattr(engine, "finished", False):
        prepare()
        step, start = int(engine.global_steps), time.perf_counter()
        loss = float(engine.train_batch(data))
        log.step(step, loss=loss, samples=engine.train_batch_size(), seconds=time.perf_counter() - start)
    log.finish(loss)
    return 0


def _micro_batches(first: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    for number in itertools.count(first):
        drawn = torch.Generator().manual_seed(number)
        yield torch.randn(2, WIDTH, generator=drawn), torch.randn(2, WIDTH, generator=drawn)


if __name__ == "__main__":
    sys.exit(main())
