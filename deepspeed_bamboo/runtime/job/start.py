"""How a worker starts in a job whose workers are not as many as its coordinates."""

from __future__ import annotations

from dataclasses import dataclass

from deepspeed_bamboo.core.seating import Seat
from deepspeed_bamboo.runtime.comm.start_workers import StartWorkers


@dataclass(frozen=True)
class Start:
    """This worker's seat, and the workers among which it has it."""

    seat: Seat
    workers: StartWorkers
