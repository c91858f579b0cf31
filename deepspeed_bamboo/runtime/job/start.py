"""How a worker starts in a job with more or fewer workers than coordinates."""

from __future__ import annotations

from dataclasses import dataclass

from deepspeed_bamboo.core.seating import Seat
from deepspeed_bamboo.runtime.comm.start_workers import StartWorkers


@dataclass(frozen=True)
class Start:
    """This worker's seat, and the workers among which it has it."""

    seat: Seat
    workers: StartWorkers
