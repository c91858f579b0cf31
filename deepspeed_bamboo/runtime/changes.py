"""Puts together the parts by which workers come and go, and stages move, between two iterations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from deepspeed_bamboo.core.slowness import Cause
from deepspeed_bamboo.runtime.iteration.mode_choice import ModeChoice
from deepspeed_bamboo.runtime.iteration.pass_times import PassTimes
from deepspeed_bamboo.runtime.iteration.worker import Worker
from deepspeed_bamboo.runtime.membership.balancing import Balancing
from deepspeed_bamboo.runtime.membership.common_state import CommonState, Known
from deepspeed_bamboo.runtime.membership.device_memory import DeviceMemory, usable_bytes_of
from deepspeed_bamboo.runtime.membership.reconfiguration import Reconfiguration
from deepspeed_bamboo.runtime.membership.steering import Steering
from deepspeed_bamboo.runtime.recovery.state_transfer import StateTransfer
from deepspeed_bamboo.runtime.recovery.world_entry import WorldEntry
from deepspeed_bamboo.runtime.stock.attributes import COUNTERS


class Changes:
    """One worker's parts; each is described where it is defined.

    Args:
        worker: whose.
        times: what its passes take.
        beside: returns what it was busy with beside its passes since the last call, in seconds.
        transfer, modes, world: the parts that a change uses.
        numbers: the engine's attributes, of which the job's counters and seed are the same on all workers.
        known: what else a worker that joins has to know, by name.
    """

    def __init__(
        self,
        worker: Worker,
        *,
        times: PassTimes,
        beside: Callable[[], dict[Cause, float]],
        transfer: StateTransfer,
        modes: ModeChoice,
        world: WorldEntry,
        numbers: dict[str, Any],
        known: Mapping[str, Known],
    ) -> None:
        device_memory = DeviceMemory(
            worker, kept_bytes=lambda: times.kept_bytes, usable_bytes=usable_bytes_of(worker.device)
        )
        balancing = Balancing(worker, times=times, beside=beside, device_memory=device_memory)
        steering = Steering(worker, balancing=balancing)
        parts: dict[str, Known] = {"balancing": balancing, "steering": steering, "modes": modes, **known}
        self.common = CommonState(numbers, names=(*COUNTERS, "forward_seed"), parts=parts)
        self.reconfiguration = Reconfiguration(
            worker,
            transfer=transfer,
            balancing=balancing,
            steering=steering,
            modes=modes,
            world=world,
            known=self.common.to_json,
        )
