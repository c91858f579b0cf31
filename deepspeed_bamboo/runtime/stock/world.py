"""torch's default process group while the plugin trains: the live workers, over the plugin's own channels.

User code that calls ``torch.distributed`` between iterations (a barrier, a metric's all-reduce) survives a
loss and goes on with the workers that are left. Stock groups can't do that, so the default group is replaced.
Meant for small things: everything goes by way of the host and the first worker.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from deepspeed.utils import groups as deepspeed_groups
from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d

from deepspeed_bamboo.runtime.comm.c10d import ProcessGroup, c10d
from deepspeed_bamboo.runtime.stock.collectives import combine
from deepspeed_bamboo.runtime.stock.logical import REDUCTIONS, FinishedWork

BACKEND = "bamboo"

Gather = Callable[[torch.Tensor], list[torch.Tensor]]


class WorldGroup(ProcessGroup):
    """Live workers as a process group. ``gather`` returns every worker's value of a tensor, in rank order."""

    def __init__(self, rank: int, size: int, *, gather: Gather) -> None:
        super().__init__(rank, size)
        self._gather = gather

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return BACKEND

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> FinishedWork:
        operation = "sum" if opts is None else REDUCTIONS.get(getattr(opts.reduceOp, "op", opts.reduceOp), "")
        if not operation:
            raise NotImplementedError(f"the world group reduces by sum, max, min and mean, not {opts.reduceOp}")
        for tensor in tensors:
            tensor.detach().copy_(combine(operation, self._gather(tensor)))
        return FinishedWork()

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> FinishedWork:
        for tensor in tensors:
            # Stock broadcasts parameters, tied ones for example.
            tensor.detach().copy_(self._gather(tensor)[opts.rootRank])
        return FinishedWork()

    def barrier(self, opts: Any = None) -> FinishedWork:
        self._gather(torch.zeros(1))
        return FinishedWork()

    def reduce(self, tensors: list[torch.Tensor], opts: Any) -> FinishedWork:
        for tensor in tensors:
            values = self._gather(tensor)
            if self.rank() == opts.rootRank:
                operation = REDUCTIONS.get(getattr(opts.reduceOp, "op", opts.reduceOp), "")
                tensor.detach().copy_(combine(operation, values))
        return FinishedWork()

    def _allgather_base(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> FinishedWork:
        output.reshape(-1).copy_(torch.cat([value.reshape(-1) for value in self._gather(tensor)]))
        return FinishedWork()

    all_gather_single = _allgather_base

    def allgather(
        self, outputs: list[list[torch.Tensor]], tensors: list[torch.Tensor], opts: Any = None
    ) -> FinishedWork:
        for output, tensor in zip(outputs, tensors, strict=True):
            for part, value in zip(output, self._gather(tensor), strict=True):
                part.copy_(value)
        return FinishedWork()


class AloneGroup(WorldGroup):
    """A group of which only this process is there: collectives give back what they are given, nothing is sent.

    What a worker that joins a running job sees until it has been taken in.
    """

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size, gather=lambda tensor: [tensor.detach().clone() for _ in range(size)])

    def send(self, tensors: list[torch.Tensor], destination: int, tag: int) -> FinishedWork:
        return FinishedWork()

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> FinishedWork:
        return FinishedWork()


class StartGroup(AloneGroup):
    """The logical grid of a job that starts, with as many ranks as it has coordinates; this worker has one of them.

    Collectives of the group itself are those of the workers: every coordinate gives what its worker gives. In groups
    made from it this process is alone, as in an :class:`AloneGroup`.
    """

    def __init__(self, rank: int, size: int, *, gather: Gather) -> None:
        WorldGroup.__init__(self, rank, size, gather=gather)


def set_default_group_aside() -> list[Any]:
    """Have torch forget its process groups without closing one; returns them, the default one first."""
    default, world = distributed_c10d._get_default_group(), distributed_c10d._world
    groups = [default, *(group for group in world.pg_names if group is not default)]
    distributed_c10d._update_default_pg(None)
    for registry in (
        world.pg_map,
        world.pg_names,
        world.pg_group_ranks,
        world.pg_backend_config,
        world.pg_to_tag,
        world.tags_to_pg,
        world.pg_coalesce_state,
    ):
        registry.clear()
    _distributed_c10d._unregister_all_process_groups()
    world.group_count = 0
    # DeepSpeed keeps a copy of the default group.
    deepspeed_groups._WORLD_GROUP = None
    return groups


def replace_default_group(group: WorldGroup) -> None:
    """Drop every stock process group and make ``group`` the default one."""
    if c10d.is_initialized():
        distributed_c10d._abort_process_group()
    if BACKEND not in c10d.Backend.backend_list:
        # torch keeps one creator per backend name, so the group itself travels through the options of each call.
        c10d.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])
    distributed_c10d.init_process_group(
        BACKEND,
        store=c10d.HashStore(),
        rank=group.rank(),
        world_size=group.size(),
        pg_options=group,
    )


def _create(options: Any, group: WorldGroup | None) -> WorldGroup:
    if group is not None:
        return group
    if isinstance(distributed_c10d._get_default_group(), AloneGroup):  # a StartGroup is one, too
        return AloneGroup(options.group_rank, options.group_size)
    raise NotImplementedError(
        "new process groups can't be made while workers may be lost; use the default group, which survives losses. A "
        "second PipelineModule, which makes groups, needs a job of its own"
    )


def has_engine() -> bool:
    """Whether an engine of the plugin has made this process's default group."""
    group = distributed_c10d._get_default_group() if c10d.is_initialized() else None
    return isinstance(group, WorldGroup) and not isinstance(group, AloneGroup)
