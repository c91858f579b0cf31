"""A training script under real agents: what the workers of ``test_anew.py`` run."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.pipe import PipelineModule

from deepspeed_bamboo.faults import Fault
from deepspeed_bamboo.protocol import AGENT_PID, NODE, WORKER
from deepspeed_bamboo.runtime.job.session import WorkerSession
from tests.runtime import models
from tests.runtime.scenarios import Training, settings_of

AT_THE_ENDS = "at-the-ends"
"""The beginning of the name of a training in which first and last stages alone have data."""


def worker(argv: list[str]) -> None:
    """``argv``: a Training's fields as JSON, the folder in which each worker writes what its script has seen, nodes.

    On one of these nodes a fault takes the worker's agent as well, first.
    """
    from deepspeed_bamboo.runtime.main import supervised

    training, folder = Training(**json.loads(argv[0])), Path(argv[1])
    if os.environ[NODE] in argv[2:]:
        _vanish_with_the_agent()
    sys.exit(supervised(lambda: run(training, folder)))


def run(training: Training, folder: Path) -> None:
    """Train, by the engine's own step; each checkpoint is complete before the next step begins."""
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(11)
    module = PipelineModule(
        layers=models.plain(training.count, dropout=training.dropout),
        loss_fn=models.squared_error,
        num_stages=training.stages,
        partition_method="uniform",
    )
    engine, *_ = deepspeed.initialize(
        model=module, model_parameters=list(module.parameters()), config=settings_of(training)
    )

    def source(pipeline: int, step: int) -> Any:
        return models.micro_batches(models.vectors, pipeline=pipeline, first_step=step, count=training.micro_batches)

    if not training.name.startswith(AT_THE_ENDS):
        engine.set_data_source(source)
    has_data = not training.name.startswith(AT_THE_ENDS) or engine.is_first_stage() or engine.is_last_stage()
    iterator, losses = source(engine.home, 0) if has_data else None, {}
    while engine.global_steps < training.steps:
        engine.checkpoints.wait()
        step = engine.global_steps
        losses[step] = float(engine.train_batch(iterator))
    found = {
        "losses": losses,
        "digest": engine.state_digest(),
        "members": len(engine.session.interruption.active.members),
    }
    engine.close()
    (folder / f"{os.environ[WORKER]}.json").write_text(json.dumps(found), encoding="utf-8")


def _vanish_with_the_agent() -> None:
    stock = WorkerSession._is_first_to_cause

    def is_first(session: WorkerSession, fault: Fault) -> bool:
        if not stock(session, fault):
            return False
        os.kill(int(os.environ[AGENT_PID]), signal.SIGKILL)
        return True

    WorkerSession._is_first_to_cause = is_first  # type: ignore[method-assign]
