"""The workers of a job that starts, over the process group that the launcher's processes made together.

While stock DeepSpeed builds a stage it sees the logical grid in place of that group. Workers exchange what they need at
the start through this module. The group stays until the job's own channels are there, since a peer may still read
from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class StartWorkers:
    """Point-to-point transfers and gathers among the workers, by their number.

    Args:
        groups: the process groups to keep, the default one first.
    """

    def __init__(self, groups: Sequence[Any]) -> None:
        self._groups = list(groups)

    @property
    def index(self) -> int:
        """The number of this worker."""
        return int(self._groups[0].rank())

    @property
    def count(self) -> int:
        """How many workers there are."""
        return int(self._groups[0].size())

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Every worker's ``tensor``, which has the same shape and type on all; collective."""
        own = self._usable(tensor)
        parts = [torch.empty_like(own) for _ in range(self.count)]
        self._groups[0].allgather([parts], [own]).wait()
        return [part.to(tensor.device) for part in parts]

    def send(self, tensor: torch.Tensor, *, to: int) -> None:
        """Send ``tensor`` to worker ``to``, which receives it."""
        self._groups[0].send([self._usable(tensor)], to, 0).wait()

    def receive(self, tensor: torch.Tensor, *, source: int) -> None:
        """Overwrite ``tensor`` by what worker ``source`` sends."""
        buffer = self._usable(tensor).clone()
        self._groups[0].recv([buffer], source, 0).wait()
        tensor.detach().copy_(buffer)

    def close(self) -> None:
        """Give the groups up; nobody may need them any more."""
        groups, self._groups = self._groups, self._groups[:0]
        for group in reversed(groups):
            group.abort()

    def _usable(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` where the group can take it: NCCL takes none from the host."""
        kinds = {device.type for device in self._groups[0]._device_types}
        place = tensor.device if tensor.device.type in kinds else torch.device(sorted(kinds)[-1])
        return tensor.detach().to(place).contiguous()
