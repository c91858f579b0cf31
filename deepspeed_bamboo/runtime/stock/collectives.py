"""Collectives of the coordinates that a worker hosts: who contributes what, and in which order it adds up.

Contributions are always combined in the order of the logical ranks, whichever workers they come from, so a
result does not depend on the placement.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from deepspeed_bamboo.core.grid import Coordinate
from deepspeed_bamboo.errors import MessageError
from deepspeed_bamboo.runtime.stock.hosting import StageHost
from deepspeed_bamboo.runtime.stock.logical import GATHER, GroupKey
from deepspeed_bamboo.runtime.stock.replica import StageReplica
from deepspeed_bamboo.runtime.stock.shadow_steps import ShadowSteps
from deepspeed_bamboo.runtime.stock.suspended import Request, SuspendedCall


@dataclass(frozen=True)
class Contribution:
    """What one coordinate contributes to one collective; ``group`` None is the gate before an update.

    Without ``tensor`` where that travels apart, see :mod:`gathering`.
    """

    group: GroupKey | None
    operation: str
    tensor: torch.Tensor | None

    @classmethod
    def of(cls, request: Request) -> Contribution:
        """From a pending request; the tensor is copied to the host, so it is a value and not a reference."""
        if request.tensor is None or request.operation == GATHER:
            return cls(request.group, request.operation, None)
        return cls(request.group, request.operation, request.tensor.detach().to("cpu", copy=True))

    def to_plain(self) -> tuple[Any, ...]:
        """As values that can be sent."""
        return (None if self.group is None else tuple(self.group), self.operation, self.tensor)

    @classmethod
    def from_plain(cls, value: tuple[Any, ...]) -> Contribution:
        """Inverse of :meth:`to_plain`. Raises MessageError for anything else."""
        try:
            group, operation, tensor = value
            key = None if group is None else GroupKey(*group)
        except (TypeError, ValueError) as error:
            raise MessageError(f"{value!r:.80} is no contribution to a collective") from error
        return cls(key, operation, tensor)


def combine(operation: str, values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Apply a collective to the members' values, given in logical rank order. Raises ValueError if unknown."""
    name, _, argument = operation.partition(":")
    if name == "broadcast":
        return values[int(argument)].clone()
    if name == GATHER:
        return torch.cat([value.reshape(-1) for value in values])
    result = values[0].clone()
    for value in values[1:]:
        # Stock contributes a 0-dimensional norm on one stage and a 1-element one on another.
        value = value.reshape(result.shape)
        if name in ("sum", "mean"):
            result += value
        elif name == "max":
            result = torch.maximum(result, value)
        elif name == "min":
            result = torch.minimum(result, value)
        else:
            raise ValueError(f"unknown collective {operation!r}; known are sum, mean, max, min, gather, broadcast:N")
    return result / len(values) if name == "mean" else result


class CallSet:
    """One suspended call per replica, all advanced together."""

    def __init__(
        self, host: StageHost, replicas: Sequence[StageReplica], function: Callable[[], None], *, device: torch.device
    ) -> None:
        self._host = host
        self._device = device
        self._calls = {replica.coordinate: (replica, SuspendedCall(function, device=device)) for replica in replicas}
        self.current: SuspendedCall | None = None
        self.beside: dict[Coordinate, ShadowSteps] = {}

    def start(self, coordinates: Container[Coordinate]) -> None:
        """Run the calls of ``coordinates`` to their first collective, those that have not begun."""
        for coordinate, steps in self.beside.items():
            if coordinate in coordinates and not self._calls[coordinate][1].started:
                steps.follow(None)
        for coordinate, (replica, call) in self._calls.items():
            if coordinate in coordinates and not call.started:
                self._advance_one(replica, call, None)
        self._host.save()

    def advance(
        self,
        answers: Mapping[Coordinate, torch.Tensor | None] | None = None,
        *,
        later: Container[Coordinate] = (),
    ) -> None:
        """Run every call to its next collective, with the answer to the one it waits for, except those of ``later``.

        ``beside`` names the coordinates whose calls run on another stream. It gets its answers before the other
        calls continue, so as not to wait for what they launch.
        """
        for coordinate, steps in self.beside.items():
            steps.follow(None if answers is None else answers.get(coordinate))
        for coordinate, (replica, call) in self._calls.items():
            if not call.done and coordinate not in later:
                self._advance_one(replica, call, None if answers is None else answers.get(coordinate))
        self._host.save()

    def finish(self, coordinate: Coordinate, answer: torch.Tensor | None) -> None:
        """Run the call of ``coordinate``, whose last collective has this ``answer``, to its end."""
        replica, call = self._calls[coordinate]
        self._advance_one(replica, call, answer)
        self._host.save()
        if not call.done:
            raise RuntimeError(f"the step of {coordinate} has one more collective than expected")

    def _advance_one(self, replica: StageReplica, call: SuspendedCall, answer: torch.Tensor | None) -> None:
        self._host.activate(replica)
        self.current = call
        try:
            call.advance(answer)
        finally:
            self.current = None

    def pending(self) -> dict[Coordinate, Request]:
        """What the unfinished calls wait for."""
        return {c: call.pending for c, (_, call) in self._calls.items() if call.pending is not None}

    def keep(self, coordinates: Container[Coordinate]) -> None:
        """Unwind and forget the calls of all others."""
        for coordinate in [c for c in self._calls if c not in coordinates]:
            replica, call = self._calls.pop(coordinate)
            self.beside.pop(coordinate, None)
            self._host.activate(replica)
            call.cancel()

    def cancel(self) -> None:
        """Unwind all calls where they stand; nothing after the pending collective runs."""
        for replica, call in self._calls.values():
            self._host.activate(replica)
            call.cancel()


def answers_from(
    pending: Mapping[Coordinate, Request], contributions: Mapping[Coordinate, Contribution], *, device: torch.device
) -> dict[Coordinate, torch.Tensor | None]:
    """The answer for each pending request, from everybody's contributions."""
    answers: dict[Coordinate, torch.Tensor | None] = {}
    for coordinate, request in pending.items():
        if request.group is None:
            answers[coordinate] = None
            continue
        values = []
        for member in request.group.members:
            contribution = contributions.get(member) or _of_same_stage(member, request.group, contributions)
            if contribution is None or contribution.tensor is None or contribution.group != request.group:
                raise RuntimeError(
                    f"{coordinate} waits for {request.operation} over {request.group.kind}, but {member} contributed "
                    f"{contribution}; all stages must take part in the same collectives"
                )
            values.append(contribution.tensor)
        answer = combine(request.operation, values)
        # A single number may stay where it is needed next, see LogicalGroup.
        answers[coordinate] = answer if answer.numel() == 1 else answer.to(device, non_blocking=True)
    return answers


def _of_same_stage(
    member: Coordinate, group: GroupKey, contributions: Mapping[Coordinate, Contribution]
) -> Contribution | None:
    """What the same stage of another pipeline contributed, for a member lost with its shadow after the commit.

    Between the commit and the step, reduced gradients and what is computed from them are equal in all pipelines.
    """
    for coordinate, contribution in contributions.items():
        other = contribution.group
        if coordinate.stage == member.stage and other is not None and other.kind == group.kind:
            return Contribution(group, contribution.operation, contribution.tensor)
    return None
