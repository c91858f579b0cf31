"""Process groups that a training script makes with ``torch.distributed.new_group``, before and after ``initialize``.

Before there is an engine such a group is torch's own, behind an object of ours. Afterwards the plugin serves the same
object, across losses. torch knows both by their ranks, which are the grid's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import distributed
from torch.distributed import distributed_c10d

from deepspeed_bamboo.runtime.stock.logical import FinishedWork
from deepspeed_bamboo.runtime.stock.served_group import Part, ServedGroup, Tensors, alone
from deepspeed_bamboo.runtime.stock.several_ranks import SeveralRanks, as_rank


class Server(Protocol):
    """Who serves the groups once there is an engine. ``name`` is the same for a group on all who hold it."""

    def ranks_here(self) -> Sequence[int]:
        """The ranks of the world that this worker stands for, its own first."""

    def holders(self, ranks: Sequence[int]) -> frozenset[str] | None:
        """Of a group made now: the workers that hold it, or None for those at home in it."""

    def gather_world(self, tensor: torch.Tensor) -> list[Part]:
        """Everybody's tensor; all workers call it."""

    def parties(self, ranks: Sequence[int], holders: frozenset[str] | None) -> dict[int, str]:
        """Who stands for which of ``ranks`` in a group that ``holders`` hold."""

    def former(
        self, count: int, *, ranks: Sequence[int] | None = None, holders: frozenset[str] | None = None
    ) -> Sequence[int]:
        """The own ranks of the workers when the world, or a group, last had ``count``; empty where nobody knows."""

    def gather(
        self, name: str, ranks: Sequence[int], holders: frozenset[str] | None, tensor: torch.Tensor
    ) -> list[Part]:
        """Everybody's tensor in a group, by rank of the world."""

    def leave_for(self, name: str, rank: int, tensor: torch.Tensor, tag: int) -> None:
        """Leave a message for the worker of that rank of the world."""

    def take_from(self, name: str, rank: int, tag: int) -> torch.Tensor:
        """The next message from the worker of that rank of the world."""


class ScriptGroup(ServedGroup):
    """One group of the script's. ``stock`` is torch's own, in use until there is a server."""

    def __init__(
        self,
        ranks: Sequence[int],
        own: int,
        *,
        groups: ScriptGroups,
        name: str,
        stock: Any = None,
        at_home: bool = False,
    ) -> None:
        """``at_home``: those who began with its ranks hold it, whenever it is made."""
        super().__init__(own, len(ranks))
        self.all_ranks = len(ranks)
        self.ranks = tuple(ranks)
        self.name = name
        self._own = own
        self._groups = groups
        self._stock = stock
        self._holders = None if groups.server is None or at_home else groups.server.holders(self.ranks)

    def rank(self) -> int:
        """This worker's place, or places; the one that it began with where it stands for none."""
        places = [self.ranks.index(rank) for rank in self._groups.ranks_here() if rank in self.ranks]
        return as_rank(places or [self._own])

    def is_here(self, rank: object) -> bool:
        """Whether this worker stands for that rank of the world."""
        return rank in self._groups.ranks_here()

    def size(self) -> int:
        """How many workers there are in it."""
        server = self._groups.server
        return self.all_ranks if server is None else len(set(server.parties(self.ranks, self._holders).values())) or 1

    def gather_all(self, tensor: torch.Tensor) -> list[Part]:
        parts = self._server.gather(self.name, self.ranks, self._holders, tensor)
        return [Part(tuple(self.ranks.index(rank) for rank in part.ranks), part.tensor) for part in parts]

    def former(self, count: int) -> Sequence[int]:
        server = self._groups.server
        found = () if server is None else server.former(count, ranks=self.ranks, holders=self._holders)
        return [self.ranks.index(rank) for rank in found]

    def send_to(self, place: int, tensor: torch.Tensor, tag: int) -> None:
        self._server.leave_for(self.name, self.ranks[place], tensor, tag)

    def receive_from(self, place: int, tag: int) -> torch.Tensor:
        return self._server.take_from(self.name, self.ranks[place], tag)

    @property
    def _server(self) -> Server:
        if self._groups.server is None:
            raise RuntimeError(f"group {self.name} is neither torch's nor the plugin's")
        return self._groups.server

    @property
    def stock(self) -> Any:
        """torch's own group, while that is in use."""
        if self._groups.server is not None:
            self._stock = None
        return self._stock


class AloneScriptGroup(ScriptGroup):
    """On a worker that comes to a running job: alone until it is taken in, then as the others'."""

    def gather_all(self, tensor: torch.Tensor) -> list[Part]:
        if self._groups.server is None:
            if self._groups.alone is not None:
                self._groups.alone()
            return alone(tensor, self.all_ranks)
        return super().gather_all(tensor)

    def send_to(self, place: int, tensor: torch.Tensor, tag: int) -> None:
        if self._groups.server is not None:
            super().send_to(place, tensor, tag)

    def receive_from(self, place: int, tag: int) -> torch.Tensor:
        if self._groups.server is None:
            raise RuntimeError("a worker that joins has nothing to receive before it is taken in")
        return super().receive_from(place, tag)

    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> FinishedWork:
        return super().recv(tensors, source, tag) if self._groups.server is not None else FinishedWork()


def _not_the_only_rank(stock: Callable[..., None]) -> Callable[..., None]:
    """torch's check that nobody sends to itself, for those who stand for one rank."""

    def check(group: Any, rank: int, rank_type: str) -> None:
        if not (isinstance(group, ServedGroup) and isinstance(group.rank(), SeveralRanks)):
            stock(group, rank, rank_type)

    return check


def _monitored_barrier(stock: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(stock)
    def monitored_barrier(group: Any = None, *args: Any, **kwargs: Any) -> None:
        chosen = distributed_c10d._get_default_group() if group is None else group
        if isinstance(chosen, ServedGroup):
            distributed.barrier(chosen)
        else:
            stock(group, *args, **kwargs)

    return monitored_barrier


def _through(name: str) -> Callable[..., Any]:
    """The method ``name``: torch's own group's while that is in use."""
    served = getattr(ServedGroup, name)

    def call(self: ScriptGroup, *args: Any, **kwargs: Any) -> Any:
        stock = self.stock
        return served(self, *args, **kwargs) if stock is None else getattr(stock, name)(*args, **kwargs)

    return call


for _name in (
    *("allreduce", "allreduce_coalesced", "broadcast", "barrier", "reduce", "_allgather_base", "all_gather_single"),
    *("allgather", "gather", "scatter", "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single"),
    *("alltoall", "send", "recv", "abort", "shutdown"),
):
    if _name in dir(ServedGroup):
        setattr(ScriptGroup, _name, _through(_name))


class ScriptGroups:
    """All groups of one process's script. ``server`` is set when the engine has entered its first epoch.

    ``alone`` is called at each collective of a worker that comes to a running job, until it is taken in.
    """

    def __init__(self) -> None:
        self.server: Server | None = None
        self.alone: Callable[[], object] | None = None
        self._groups: list[ScriptGroup] = []
        self._of_grid: dict[str, ScriptGroup] = {}
        self._aside = False

    def ranks_here(self) -> Sequence[int]:
        """The ranks of the world that this worker stands for, its own first; none before there is an engine."""
        return () if self.server is None else self.server.ranks_here()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Inside, ``torch.distributed.new_group`` makes groups that outlive torch's own.

        And a worker that stands for several ranks may send to one of them, as the lost worker did. In a group that the
        plugin serves ``monitored_barrier``, which torch knows for gloo's only, is its barrier.
        """
        stock, check = distributed.new_group, distributed_c10d._check_not_self_rank
        monitored = distributed.monitored_barrier
        distributed.new_group = distributed_c10d.new_group = self._new_group(stock)
        distributed.monitored_barrier = distributed_c10d.monitored_barrier = _monitored_barrier(monitored)
        distributed_c10d._check_not_self_rank = _not_the_only_rank(check)
        try:
            yield
        finally:
            distributed.new_group = distributed_c10d.new_group = stock
            distributed.monitored_barrier = distributed_c10d.monitored_barrier = monitored
            distributed_c10d._check_not_self_rank = check

    def make(self, ranks: Sequence[int], own: int, *, alone: bool = False) -> ScriptGroup:
        """Called by torch for a group that this worker is in, once the world is the plugin's."""
        kind = AloneScriptGroup if alone else ScriptGroup
        group = kind(ranks, own, groups=self, name=self._name(ranks))
        self._groups.append(group)
        return group

    def of_grid(self, kind: str, ranks: Sequence[int], own: int) -> ScriptGroup:
        """What a script gets where it asks the engine's grid for a group: one like those that it makes itself.

        Workers may ask for it at different times, so those who hold it are those who began in it.
        """
        name = f"grid/{kind}:{','.join(map(str, ranks))}"
        if name not in self._of_grid:
            group = ScriptGroup(ranks, own, groups=self, name=name, at_home=True)
            self._of_grid[name] = group
            self._register(group)
        return self._of_grid[name]

    def put_aside(self) -> None:
        """Before torch drops all groups: it must not end those that continue. Once is enough."""
        if self._aside:
            return
        self._aside = True
        self._groups = [group for group in self._groups if group in distributed_c10d._world.pg_map]
        for group in (*self._groups, *self._of_grid.values()):
            for known in _registers():
                known.pop(group, None)

    def rename(self, ranks: Sequence[int]) -> None:
        """From now on the world's rank ``k`` is called ``ranks[k]``, in groups that there are, too."""
        self.server = None
        for group in self._groups:
            group.ranks = tuple(ranks[rank] for rank in group.ranks)

    def register_again(self) -> None:
        """After the world was rebuilt: torch knows the groups, and the ranks in them."""
        self._aside = False
        for group in (*self._groups, *self._of_grid.values()):
            self._register(group)

    def _new_group(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        def new_group(ranks: Sequence[int] | None = None, *args: Any, **kwargs: Any) -> Any:
            world = distributed_c10d._get_default_group()
            if isinstance(world, ServedGroup):
                return stock(ranks, *args, **kwargs)  # which comes to :meth:`make`
            if self.server is not None:  # of an engine of which nothing is left
                self.server = None
                self._groups.clear()
                self._of_grid.clear()
            made = stock(ranks, *args, **kwargs)
            everybody = list(range(world.size()))
            chosen = everybody if ranks is None else sorted(ranks) if kwargs.get("sort_ranks", True) else list(ranks)
            name = self._name(chosen)
            if made is None or made == distributed_c10d.GroupMember.NON_GROUP_MEMBER:
                return made
            group = ScriptGroup(chosen, chosen.index(world.rank()), groups=self, name=name, stock=made)
            self._groups.append(group)
            self._register(group, like=made)
            return group

        return new_group

    def _name(self, ranks: Sequence[int]) -> str:
        """The same on all that make the same groups in the same order, whichever of them they are in."""
        same = sum(group.ranks == tuple(ranks) for group in self._groups)
        return f"{','.join(map(str, ranks))}#{same}"

    def _register(self, group: ScriptGroup, *, like: Any = None) -> None:
        world: Any = distributed_c10d._world
        world.pg_map[group] = world.pg_map.get(like, ("bamboo", None))
        world.pg_names[group] = f"script/{group.name}"
        world.pg_backend_config[group] = world.pg_backend_config.get(like, "bamboo")
        world.pg_to_tag[group] = ""
        world.pg_group_ranks[group] = _PlacesOf(group)


class _PlacesOf(dict[int, int]):
    """Places in a group by rank of the world.

    A worker that stands for several ranks has its place in the group under each of them: a script calculates ranks
    from the lowest, and the group may be of another one. One that stands for none of the group's ranks any more has
    the place that it began with.
    """

    def __init__(self, group: ScriptGroup) -> None:
        super().__init__({rank: place for place, rank in enumerate(group.ranks)})
        self._group = group

    def __contains__(self, rank: object) -> bool:
        return self._known(rank) is not None or self._group.is_here(rank)

    def __missing__(self, rank: int) -> int:
        known = self._known(rank)
        if known is not None:
            return self[known]
        if self._group.is_here(rank):
            return int(self._group.rank())
        raise KeyError(rank)

    def _known(self, rank: object) -> int | None:
        names: tuple[Any, ...] = getattr(rank, "ranks", (rank,))
        return next((int(one) for one in names if super(_PlacesOf, self).__contains__(one)), None)


def _registers() -> tuple[dict[Any, Any], ...]:
    world = distributed_c10d._world
    return (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config, world.pg_to_tag)
