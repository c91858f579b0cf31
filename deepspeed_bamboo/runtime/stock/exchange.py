"""Collectives of stock code before the agreement: tensors go from owner to owner, and everybody adds up in one order.

Large tensors are reduced in chunks, each by one of the members, so that nobody holds more than twice its own tensor,
however many members there are: first everybody sends each chunk to its member, then the members send their results.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from deepspeed_bamboo.core.grid import Coordinate
from deepspeed_bamboo.core.placement import Placement, WorkerId
from deepspeed_bamboo.runtime.comm.channel import Message
from deepspeed_bamboo.runtime.comm.peers import Links
from deepspeed_bamboo.runtime.stock.collectives import combine
from deepspeed_bamboo.runtime.stock.suspended import Request

# With fewer numbers a second message costs more than it saves.
CHUNKED_FROM = 1024
_RESULT = "/result"
_BY_ELEMENT = frozenset({"sum", "mean", "max", "min"})


def exchange_requests(
    pending: Mapping[Coordinate, Request],
    *,
    links: Links,
    placement: Placement,
    me: WorkerId,
    label: str,
) -> dict[Coordinate, torch.Tensor | None]:
    """Serve one collective for hosted coordinates, tensor by tensor between the workers concerned.

    Left out is who has to wait for another one of this worker's to come to the same collective. The answers are new
    tensors, on the devices of what was handed in, which stays as it is. Raises what interrupts a wait.
    """
    exchange = _Exchange(links, owners=dict(placement.owners), me=me, label=label)
    asked = {c: r for c, r in pending.items() if r.tensor is not None and exchange.all_here_ask(r, pending)}
    chunked = {c: r for c, r in asked.items() if _is_chunked(r)}
    whole = {c: r for c, r in asked.items() if c not in chunked}
    # All is sent before anything is waited for, since others may begin with another group. And all is received before
    # anything is computed: a kernel's first launch may wait for what the device sends to be received.
    own = exchange.send_whole(whole)
    exchange.send_chunks(chunked)
    received = exchange.receive(whole)
    chunks = {c: exchange.receive_chunks(c, chunked) for c in chunked}
    results = {c: combine(chunked[c].operation, parts) for c, parts in chunks.items()}
    exchange.send_results(chunked, results)
    theirs = exchange.receive(chunked, what=_RESULT)
    answers: dict[Coordinate, torch.Tensor | None] = {c: None for c, r in pending.items() if r.tensor is None}
    values = {**received, **own}
    for coordinate, request in whole.items():
        answers[coordinate] = combine(request.operation, [values[key] for _, key in exchange.members(request)])
    for coordinate, request in chunked.items():
        parts = [results[m] if m in results else theirs[key] for m, key in exchange.members(request)]
        answers[coordinate] = torch.cat(parts).view(request.value.shape)
    return answers


class _Exchange:
    """The messages of one exchange of this worker's."""

    def __init__(self, links: Links, *, owners: Mapping[Coordinate, WorkerId], me: WorkerId, label: str) -> None:
        self._links = links
        self._owners = owners
        self._me = me
        self._label = label

    def all_here_ask(self, request: Request, pending: Mapping[Coordinate, Request]) -> bool:
        """True if every member of the group that this worker hosts has come to this collective."""
        here = [pending.get(member) for member in request.members if self._owners[member] == self._me]
        return all(other is not None and _same(other, request) for other in here)

    def members(self, request: Request) -> Iterator[tuple[Coordinate, str]]:
        """The members of the group, each with the key of its contribution."""
        kind = request.group.kind if request.group is not None else "gate"
        for member in request.members:
            yield member, f"{self._label}/{kind}/{request.sequence}/{member}"

    def send_whole(self, asked: Mapping[Coordinate, Request]) -> dict[str, torch.Tensor]:
        """Send what is asked to all members. Copies, also returned: stock writes the answer into the tensor."""
        own = {}
        for coordinate, request in asked.items():
            key = dict(self.members(request))[coordinate]
            own[key] = request.value.clone()
            for peer in self._peers(request):
                self._links.send(peer, Message(key, tensors=[own[key]]))
        return own

    def receive(self, asked: Mapping[Coordinate, Request], *, what: str = "") -> dict[str, torch.Tensor]:
        """What the other members send under the keys of their contributions, each followed by ``what``."""
        received: dict[str, torch.Tensor] = {}
        for request in asked.values():
            for member, key in self._others(request):
                if key not in received:
                    received[key] = self._receive(member, f"{key}{what}", like=request)
        return received

    def send_chunks(self, asked: Mapping[Coordinate, Request]) -> None:
        """Send each member of the groups its chunk. Stays unchanged: the answer comes after everybody has used it."""
        for coordinate, request in asked.items():
            key, chunks = dict(self.members(request))[coordinate], _chunks(request)
            for (member, _), chunk in zip(self.members(request), chunks, strict=True):
                if self._owners[member] != self._me:
                    self._links.send(self._owners[member], Message(f"{key}/for/{member}", tensors=[chunk]))

    def receive_chunks(self, coordinate: Coordinate, asked: Mapping[Coordinate, Request]) -> list[torch.Tensor]:
        """All members' values of the chunk that ``coordinate`` reduces, in their order."""
        request = asked[coordinate]
        place = request.members.index(coordinate)
        return [
            _chunks(asked[member])[place]
            if self._owners[member] == self._me
            else self._receive(member, f"{key}/for/{coordinate}", like=request)
            for member, key in self.members(request)
        ]

    def send_results(self, asked: Mapping[Coordinate, Request], results: Mapping[Coordinate, torch.Tensor]) -> None:
        """Send what the coordinates here have reduced to the other members."""
        for coordinate, request in asked.items():
            key = dict(self.members(request))[coordinate]
            for peer in self._peers(request):
                self._links.send(peer, Message(f"{key}{_RESULT}", tensors=[results[coordinate]]))

    def _others(self, request: Request) -> Iterator[tuple[Coordinate, str]]:
        return ((member, key) for member, key in self.members(request) if self._owners[member] != self._me)

    def _peers(self, request: Request) -> Sequence[WorkerId]:
        return other_owners(request, self._owners, me=self._me)

    def _receive(self, member: Coordinate, key: str, *, like: Request) -> torch.Tensor:
        # By lane it stays on the device, by a plain channel it comes on the host.
        return self._links.receive(self._owners[member], key).tensors[0].to(like.value.device)


def other_owners(request: Request, owners: Mapping[Coordinate, WorkerId], *, me: WorkerId) -> tuple[WorkerId, ...]:
    """The workers other than ``me`` that own members of the request's group, each once, in the group's order."""
    found = dict.fromkeys(owners[member] for member in request.members)
    return tuple(worker for worker in found if worker != me)


def _same(one: Request, other: Request) -> bool:
    """Whether two members ask for the same collective."""
    return (one.group, one.sequence) == (other.group, other.sequence)


def _is_chunked(request: Request) -> bool:
    return request.operation in _BY_ELEMENT and request.value.numel() >= CHUNKED_FROM


def _chunks(request: Request) -> Sequence[torch.Tensor]:
    """The tensor in one dimension, in as many pieces as the group has members."""
    return request.value.reshape(-1).tensor_split(len(request.members))
