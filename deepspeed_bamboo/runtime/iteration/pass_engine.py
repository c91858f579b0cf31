"""The part of the engine that the passes of a micro-batch use."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from deepspeed_bamboo.runtime.iteration.feeding import Feed
from deepspeed_bamboo.runtime.iteration.recompute import RunningTotals
from deepspeed_bamboo.runtime.job.session import WorkerSession


class LateSteps(Protocol):
    """The end of the iteration before."""

    def launch_late_steps(self) -> None:
        """Launch the steps of shadows that were put off until a first message was out."""


class Recovery(Protocol):
    """What is known of losses."""

    @property
    def recovering(self) -> bool:
        """True in the rest of an interrupted iteration."""


class PassEngine(RunningTotals, Protocol):
    """The engine while it works on one stage; most attributes are stock's, of that stage."""

    session: WorkerSession
    device: torch.device
    dynamic_shape: bool
    module: Any
    pipe_buffers: dict[str, list[Any]]
    grad_layer: Any
    loss: Any
    feed: Feed

    @property
    def iteration_end(self) -> LateSteps:
        """The end of the iteration before."""

    @property
    def failover(self) -> Recovery:
        """Whether this iteration was interrupted."""

    def stock_forward(self, buffer_id: int) -> None:
        """Stock's forward of the active stage."""

    def stock_backward(self, buffer_id: int) -> None:
        """Stock's backward of the active stage."""

    def is_first_stage(self) -> bool:
        """Of the active stage."""

    def is_last_stage(self) -> bool:
        """Of the active stage."""

    def _exec_load_micro_batch(self, buffer_id: int) -> None: ...
