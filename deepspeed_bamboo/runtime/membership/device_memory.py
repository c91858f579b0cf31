"""What this worker's stages take on its GPU, and how much room there is: for placements that devices can hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from deepspeed_bamboo.core.placement import Placement
from deepspeed_bamboo.runtime.iteration.worker import Worker
from deepspeed_bamboo.runtime.recovery.stage_state import pack_state
from deepspeed_bamboo.runtime.stock.gradients import gradient_bytes
from deepspeed_bamboo.runtime.stock.plain_forms import device_of
from deepspeed_bamboo.runtime.stock.replica import StageReplica


class DeviceMemory:
    """Of one worker; measured once for each placement, between two iterations.

    Args:
        worker: whose stages count.
        kept_bytes: returns by stage what a forward keeps for its backward.
        usable_bytes: returns what tensors of this process can take on the device, and what they took at most; None
            where devices have no memory of their own, as on a CPU. Then nothing is measured.
    """

    def __init__(
        self,
        worker: Worker,
        *,
        kept_bytes: Callable[[], Mapping[int, int]],
        usable_bytes: Callable[[], tuple[int, int]] | None,
    ) -> None:
        self._worker = worker
        self._kept_bytes = kept_bytes
        self._usable_bytes = usable_bytes
        self._of: Placement | None = None
        self._measured: dict[str, Any] | None = None

    def measured(self) -> dict[str, Any] | None:
        """What ``MeasuredMemory.after`` takes in; None where it is not known."""
        if self._usable_bytes is None:
            return None
        placement, host = self._worker.placement, self._worker.host
        if placement is not self._of:
            kept = self._kept_bytes()
            if any(coordinate.stage not in kept for coordinate in host.owned):
                return None
            stages = [[c.stage, state_bytes(owned), kept[c.stage]] for c, owned in host.owned.items()]
            usable, peak = self._usable_bytes()
            self._of, self._measured = placement, {"stages": stages, "usable": usable, "peak": peak}
        return self._measured


def state_bytes(replica: StageReplica) -> int:
    """Bytes of a stage's parameters, buffers, gradients, master weights and optimizer state on its device."""
    optimizer, module = replica.attributes["optimizer"], replica.module
    device = device_of(module)
    tensors = [tensor for tensor in pack_state(replica).tensors if tensor.device == device]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values()) + gradient_bytes(optimizer, module)


def usable_bytes_of(device: torch.device) -> Callable[[], tuple[int, int]] | None:
    """For :class:`DeviceMemory`; None for a CPU."""
    if device.type != "cuda":
        return None

    def usable_bytes() -> tuple[int, int]:
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device), torch.cuda.max_memory_allocated(device)

    return usable_bytes
