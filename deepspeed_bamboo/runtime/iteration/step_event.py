"""What a worker's event log says about a committed iteration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from deepspeed_bamboo.runtime.iteration.micro_batches import PipelineData
from deepspeed_bamboo.runtime.job.session import WorkerSession
from deepspeed_bamboo.runtime.stock.hosting import StageHost


class SteppedEngine(Protocol):
    """What is read of an engine that has just taken a step."""

    session: WorkerSession
    data: PipelineData
    mean_loss: float
    additional_losses: Mapping[str, float]
    micro_batches: int
    global_steps: int

    @property
    def host(self) -> StageHost:
        """The stages that this worker holds."""

    def train_batch_size(self) -> int:
        """Samples of an iteration, of all pipelines."""


def log_step(engine: SteppedEngine, *, seconds: float, mode: str, slow: Mapping[str, float]) -> None:
    """Log the step just taken: its loss, and which part this worker had in it.

    ``mode`` is the redundancy mode in which it was planned; ``slow`` has the speeds of slow workers, 1 is as before.

    ``hosted`` are the coordinates whose step it took; ``used``, by pipeline whose first stage is among them, the
    micro-batches that went in, counted from the job's first (begin, end). So the logs of all workers show that
    every coordinate stepped once, and every micro-batch was used once, in order.
    """
    hosted = [replica.coordinate for replica in engine.host.owners()]
    firsts = [coordinate.pipeline for coordinate in hosted if coordinate.stage == 0]
    engine.session.past.note_additional(engine.global_steps - 1, engine.additional_losses)
    engine.session.log(
        "step",
        step=engine.global_steps - 1,
        loss=engine.mean_loss,
        samples=engine.train_batch_size(),
        seconds=seconds,
        mode=mode,
        **({"slow": dict(slow)} if slow else {}),
        hosted=[str(coordinate) for coordinate in hosted],
        used={str(pipeline): engine.data.used(pipeline, micro_batches=engine.micro_batches) for pipeline in firsts},
    )
