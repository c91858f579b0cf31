"""A process group whose collectives are served by the plugin: all of them from one operation, everybody's tensors.

Meant for small things: everything goes by way of the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from deepspeed_bamboo.runtime.comm.c10d import ProcessGroup
from deepspeed_bamboo.runtime.stock.collectives import combine
from deepspeed_bamboo.runtime.stock.logical import REDUCTIONS, FinishedWork

Tensors = list[torch.Tensor]


class Part(NamedTuple):
    """What one worker has handed in, and the ranks in the group that it stands for, its own first."""

    ranks: tuple[int, ...]
    tensor: torch.Tensor


class ServedGroup(ProcessGroup):
    """Base of the world and of a script's groups. A subclass says how tensors are gathered, and messages sent.

    Ranks stay what they are when workers are lost. What is summed, and gathered, is one tensor of each live worker.
    ``all_ranks`` is how many ranks there were at first.
    """

    all_ranks: int

    def gather_all(self, tensor: torch.Tensor) -> list[Part]:
        """Everybody's ``tensor``, on its device, in the order of ranks. Collective."""
        raise NotImplementedError

    def former(self, count: int) -> Sequence[int]:
        """The own ranks of the workers that it had when it last had ``count``; empty where that isn't known."""
        return ()

    def send_to(self, rank: int, tensor: torch.Tensor, tag: int) -> None:
        """Leave ``tensor`` for the worker that stands for ``rank``; does not wait."""
        raise NotImplementedError

    def receive_from(self, rank: int, tag: int) -> torch.Tensor:
        """What the worker that stands for ``rank`` has left for this one; waits for it."""
        raise NotImplementedError

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return "bamboo"

    def abort(self) -> None:
        """Nothing is waiting in here."""

    def shutdown(self) -> None:
        """Nothing has to be ended."""

    def allreduce(self, tensors: Tensors, opts: Any = None) -> FinishedWork:
        operation = _operation(opts)
        for tensor in tensors:
            _set(tensor, combine(operation, self._alike(tensor)))
        return FinishedWork()

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> FinishedWork:
        return self.allreduce(tensors, opts)

    def broadcast(self, tensors: Tensors, opts: Any) -> FinishedWork:
        for tensor in tensors:
            # Stock broadcasts parameters, tied ones for example.
            _set(tensor, self._of_root(self.gather_all(tensor), opts.rootRank, like=tensor))
        return FinishedWork()

    def barrier(self, opts: Any = None) -> FinishedWork:
        self.gather_all(torch.zeros(1))
        return FinishedWork()

    def reduce(self, tensors: Tensors, opts: Any) -> FinishedWork:
        for tensor in tensors:
            values = self._alike(tensor)
            if self.rank() == opts.rootRank:
                _set(tensor, combine(_operation(opts), values))
        return FinishedWork()

    def _allgather_base(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> FinishedWork:
        parts = self.gather_all(tensor)
        size = tensor.numel()
        pieces = list(torch.split(output.view(-1), size)) if size and output.numel() % size == 0 else [output.view(-1)]
        self._fill(pieces, parts, call="all_gather")
        return FinishedWork()

    # torch renamed the single-tensor forms; both names reach the same code.
    all_gather_single = _allgather_base

    def allgather(self, outputs: list[Tensors], tensors: Tensors, opts: Any = None) -> FinishedWork:
        for output, tensor in zip(outputs, tensors, strict=True):
            self._fill(output, self.gather_all(tensor), call="all_gather")
        return FinishedWork()

    def gather(self, outputs: list[Tensors], tensors: Tensors, opts: Any) -> FinishedWork:
        for index, tensor in enumerate(tensors):
            parts = self.gather_all(tensor)
            if self.rank() == opts.rootRank:
                self._fill(outputs[index], parts, call="gather")
        return FinishedWork()

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> FinishedWork:
        for index, output in enumerate(outputs):
            parts = self.gather_all(torch.stack(list(inputs[index])) if inputs else output.new_empty(0))
            _set(output, self._own_row(self._of_root(parts, opts.rootRank, like=None), parts, call="scatter"))
        return FinishedWork()

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = None) -> FinishedWork:
        for output, own in zip(outputs, inputs, strict=True):
            parts = self.gather_all(torch.stack(list(own)))
            rows = [self._own_row(part.tensor, parts, call="reduce_scatter") for part in parts]
            _set(output, combine(_operation(opts), rows))
        return FinishedWork()

    def _reduce_scatter_base(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> FinishedWork:
        return self.reduce_scatter([output], [list(tensor.view(-1, *output.shape))], opts)

    reduce_scatter_single = _reduce_scatter_base

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> FinishedWork:
        parts = self.gather_all(torch.stack(list(inputs)))
        rows = [Part(part.ranks, self._own_row(part.tensor, parts, call="all_to_all")) for part in parts]
        self._fill(outputs, rows, call="all_to_all")
        return FinishedWork()

    def send(self, tensors: Tensors, destination: int, tag: int = 0) -> FinishedWork:
        for tensor in tensors:
            self.send_to(destination, tensor, tag)
        return FinishedWork()

    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> FinishedWork:
        """Received when the handle that is returned is waited for, so that two ranks may both receive first."""
        return _Receiving(lambda: self._receive_into(tensors, source, tag))

    def _receive_into(self, tensors: Tensors, source: int, tag: int) -> None:
        for tensor in tensors:
            found = self.receive_from(source, tag)
            _check_alike(found, tensor, who=f"rank {source} sent", me="recv was given")
            _set(tensor, found)

    def _alike(self, tensor: torch.Tensor) -> Tensors:
        """Everybody's tensor in the order of ranks. Raises ValueError where they differ in size or type."""
        parts = self.gather_all(tensor)
        for part in parts:
            _check_alike(part.tensor, tensor, who=f"rank {part.ranks[0]} passed", me=f"rank {int(self.rank())} passed")
        return [part.tensor for part in parts]

    def _of_root(self, parts: list[Part], root: int, *, like: torch.Tensor | None) -> torch.Tensor:
        found = [part.tensor for part in parts if root in part.ranks]
        if not found:
            there = sorted(rank for part in parts for rank in part.ranks)
            raise ValueError(f"rank {root} is not among the ranks of this group that somebody stands for, {there}")
        if like is not None:
            _check_alike(found[0], like, who=f"rank {root} passed", me=f"rank {int(self.rank())} passed")
        return found[0]

    def _fill(self, output: Tensors, parts: list[Part], *, call: str) -> None:
        """Into one tensor for each live worker, or for each there was before a loss, or, as before any, for each rank.

        A script may have asked for the size before it knew of a loss. In the place of who was lost is what the one has
        passed who stands for that rank.
        """
        if len(output) == len(parts):
            found = list(enumerate(part.tensor for part in parts))
        elif len(output) == self.all_ranks:
            found = [(rank, part.tensor) for part in parts for rank in part.ranks if rank < self.all_ranks]
        elif former := self.former(len(output)):
            found = [(place, _standing_for(rank, parts).tensor) for place, rank in enumerate(former)]
        else:
            raise ValueError(
                f"{call} with {len(output)} tensors, but there are {len(parts)} workers; give one for each"
            )
        for place, value in found:
            _check_alike(value, output[place], who=f"{call} got", me="there is room for")
            _set(output[place], value)

    def _own_row(self, rows: torch.Tensor, parts: list[Part], *, call: str) -> torch.Tensor:
        """Of one row for each live worker, or for each rank, this worker's."""
        own = int(self.rank())
        if len(rows) == len(parts):
            return rows[next(place for place, part in enumerate(parts) if own in part.ranks)]
        if len(rows) == self.all_ranks:
            return rows[own]
        former = self.former(len(rows))
        if own not in former:
            raise ValueError(f"{call} with {len(rows)} tensors, but there are {len(parts)} workers; give one for each")
        return rows[list(former).index(own)]


def _standing_for(rank: int, parts: list[Part]) -> Part:
    """Nobody stands for the rank of one that stood by and was lost; what it would have passed is anybody's."""
    return next((part for part in parts if rank in part.ranks), parts[0])


def alone(tensor: torch.Tensor, ranks: int) -> list[Part]:
    """What a worker gathers that is alone, as if it stood for everybody."""
    return alone_as(range(ranks), tensor)


def alone_as(ranks: Sequence[int], tensor: torch.Tensor) -> list[Part]:
    """As :func:`alone`, in a group of these ``ranks``."""
    return [Part((rank,), tensor.detach().clone()) for rank in ranks]


class _Receiving(FinishedWork):
    def __init__(self, receive: Any) -> None:
        self._receive = receive

    def wait(self, timeout: Any = None) -> bool:
        receive, self._receive = self._receive, None
        if receive is not None:
            receive()
        return True

    def is_completed(self) -> bool:
        return self._receive is None


def _operation(opts: Any) -> str:
    reduction = None if opts is None else getattr(opts.reduceOp, "op", opts.reduceOp)
    operation = "sum" if reduction is None else REDUCTIONS.get(reduction, "")
    if not operation:
        raise NotImplementedError(f"{opts.reduceOp} is none of sum, max, min and mean, the reductions there are")
    return operation


def _set(tensor: torch.Tensor, value: torch.Tensor) -> None:
    tensor.detach().copy_(value.reshape(tensor.shape))


def _check_alike(value: torch.Tensor, own: torch.Tensor, *, who: str, me: str) -> None:
    if value.dtype != own.dtype or value.numel() != own.numel():
        raise ValueError(
            f"{who} {value.dtype} of shape {_shape(value)}, {me} {own.dtype} of shape {_shape(own)}; every rank must "
            "pass the same type and size"
        )


def _shape(tensor: torch.Tensor) -> Sequence[int]:
    return tuple(tensor.shape)
