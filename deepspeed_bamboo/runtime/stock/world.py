"""torch's default process group while the plugin trains: the ranks of the grid, over the plugin's own channels.

A user's calls of ``torch.distributed`` between iterations (a barrier, a metric's all-reduce) survive a loss: they
continue with the remaining workers, each with the rank that it had. The worker that took a lost worker's stage over
stands for its rank too. Stock groups can't do that, so the default group is replaced. Meant for small things:
everything goes by way of the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from deepspeed.utils import groups as deepspeed_groups
from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d

from deepspeed_bamboo.runtime.comm.c10d import c10d
from deepspeed_bamboo.runtime.stock.logical import FinishedWork
from deepspeed_bamboo.runtime.stock.script_groups import ScriptGroup, ScriptGroups, Server
from deepspeed_bamboo.runtime.stock.served_group import Part, ServedGroup, alone
from deepspeed_bamboo.runtime.stock.several_ranks import as_rank

BACKEND = "bamboo"
_WORLD = "world"

Gather = Callable[[torch.Tensor], list[torch.Tensor]]


class WorldGroup(ServedGroup):
    """All live workers as a process group, with the ranks of the grid.

    Args:
        rank: this worker's own rank; one that stands by has one that is not below ``size``.
        size: how many workers there are.
        all_ranks: of the grid.
        server: serves what is called here, and the groups made of it.
        groups: the script's groups, which belong to this world.
    """

    def __init__(self, rank: int, size: int, *, all_ranks: int, server: Server, groups: ScriptGroups) -> None:
        super().__init__(rank, size)
        self.all_ranks = all_ranks
        self._server = server
        self.groups = groups

    def rank(self) -> int:
        return as_rank(self._server.ranks_here())

    def gather_all(self, tensor: torch.Tensor) -> list[Part]:
        return self._server.gather_world(tensor)

    def former(self, count: int) -> Sequence[int]:
        return self._server.former(count)

    def send_to(self, place: int, tensor: torch.Tensor, tag: int) -> None:
        self._server.leave_for(_WORLD, place, tensor, tag)

    def receive_from(self, place: int, tag: int) -> torch.Tensor:
        return self._server.take_from(_WORLD, place, tag)


class AloneGroup(ServedGroup):
    """A group of which only this process is there: collectives give back what they are given, nothing is sent.

    What a worker that joins a running job sees until it has been taken in.
    """

    def __init__(self, rank: int, size: int, *, groups: ScriptGroups) -> None:
        super().__init__(rank, size)
        self.all_ranks = size
        self.groups = groups

    def gather_all(self, tensor: torch.Tensor) -> list[Part]:
        if self.groups.alone is not None:
            self.groups.alone()
        return alone(tensor, self.all_ranks)

    def send(self, tensors: list[torch.Tensor], destination: int, tag: int = 0) -> FinishedWork:
        return FinishedWork()

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int = 0) -> FinishedWork:
        return FinishedWork()


class StartGroup(AloneGroup):
    """The logical grid of a job that starts, with as many ranks as it has coordinates; this worker has one of them.

    Collectives of the group itself are those of the workers: every coordinate gives what its worker gives. In groups
    made from it this process is alone, as in an :class:`AloneGroup`.
    """

    def __init__(self, rank: int, size: int, *, gather: Gather, groups: ScriptGroups) -> None:
        super().__init__(rank, size, groups=groups)
        self._gather = gather

    def gather_all(self, tensor: torch.Tensor) -> list[Part]:
        return [Part((rank,), value) for rank, value in enumerate(self._gather(tensor))]


def set_default_group_aside(script_groups: ScriptGroups) -> list[Any]:
    """Have torch forget its process groups without closing one; returns them, the default one first.

    Those of the script, which are behind ``script_groups``, continue.
    """
    script_groups.put_aside()
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


def replace_default_group(group: WorldGroup | AloneGroup) -> None:
    """Drop every stock process group and make ``group`` the default one; the script's groups continue in it."""
    if c10d.is_initialized():
        group.groups.put_aside()
        distributed_c10d._abort_process_group()
    if BACKEND not in c10d.Backend.backend_list:
        # torch keeps one creator per backend name, so the group itself travels through the options of each call.
        c10d.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])
    distributed_c10d.init_process_group(
        BACKEND,
        store=c10d.HashStore(),
        rank=int(group.rank()),
        world_size=group.size(),
        pg_options=group,
    )
    group.groups.register_again()


def _create(options: Any, group: WorldGroup | AloneGroup | None) -> WorldGroup | AloneGroup | ScriptGroup:
    """The group that torch is making: the world, or one of the script's."""
    if group is not None:
        return group
    world: Any = distributed_c10d._get_default_group()
    ranks = options.global_ranks_in_group or list(range(options.group_size))
    made: ScriptGroup = world.groups.make(ranks, options.group_rank, alone=isinstance(world, AloneGroup))
    return made


def has_engine() -> bool:
    """Whether an engine of the plugin has made this process's default group."""
    group = distributed_c10d._get_default_group() if c10d.is_initialized() else None
    return isinstance(group, WorldGroup)
