"""What an optimizer that is split over the pipelines gathers in its step: the parameters of all partitions.

They are too large for an agreement, and for a report after a loss. So owners send them to each other and to the
shadows, as device tensors. The agreement that follows only says that everybody has them. A worker that has seen it can
finish the step by itself (architecture 5, commit rule). If nobody has seen it, everything is sent again.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from deepspeed_bamboo.core.grid import Coordinate
from deepspeed_bamboo.core.placement import Placement, WorkerId
from deepspeed_bamboo.runtime.comm.channel import Message
from deepspeed_bamboo.runtime.comm.peers import Links
from deepspeed_bamboo.runtime.stock.collectives import combine
from deepspeed_bamboo.runtime.stock.exchange import other_owners
from deepspeed_bamboo.runtime.stock.logical import GATHER
from deepspeed_bamboo.runtime.stock.suspended import Request


def gather(
    pending: Mapping[Coordinate, Request], *, links: Links, placement: Placement, me: WorkerId, label: str
) -> dict[Coordinate, torch.Tensor]:
    """The answers to those of ``pending`` that gather, one after the other in one tensor; collective.

    All owners of a stage ask for the same at the same time; holders get their shadows' answers from the owners.
    Raises what interrupts a wait.
    """
    asked = {c: request for c, request in pending.items() if request.operation == GATHER}
    owners = dict(placement.owners)
    own = {c: request for c, request in asked.items() if owners[c] == me}
    for coordinate, request in own.items():
        for peer in other_owners(request, owners, me=me):
            links.send(peer, Message(f"{label}/part/{coordinate}", tensors=[request.value]))
    parts = {c: request.value for c, request in own.items()}
    # All of it before anything is launched: a kernel's first launch may wait for what the device sends to be received.
    for request in own.values():
        for member in request.members:
            if member not in parts:
                part = links.receive(owners[member], f"{label}/part/{member}").tensors[0]
                parts[member] = part.to(request.value.device)
    answers = {c: combine(GATHER, [parts[m] for m in request.members]) for c, request in own.items()}
    for coordinate in own:
        for holder in placement.copies_of(coordinate)[1:]:
            links.send(holder, Message(f"{label}/whole/{coordinate}", tensors=[answers[coordinate]]))
    for coordinate in placement.shadowed_by(me) if asked else ():
        whole = links.receive(owners[coordinate], f"{label}/whole/{coordinate}").tensors[0]
        if coordinate in asked:
            answers[coordinate] = whole.to(asked[coordinate].value.device)
    return answers
