"""Lowering: compute orders -> programs, by adding loads, sends, receives and the tail.

On every ordered pair of workers messages arrive in the order in which they were sent, and a receive takes
the head. So the sends are placed first (right after what they send; what an interrupted iteration already
has, at the start) and each receive right before its consumer, together with everything that its channel
delivers before it. That can't add a wait: those messages were sent earlier by the same worker.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from deepspeed_bamboo.core.grid import Coordinate
from deepspeed_bamboo.core.instructions import RECEIVES, SENDS, TAIL, Instruction, Op
from deepspeed_bamboo.core.placement import Placement, WorkerId
from deepspeed_bamboo.core.progress import CoordinateProgress
from deepspeed_bamboo.core.schedule import Mode
from deepspeed_bamboo.core.timeline import Order


class Route(NamedTuple):
    """One kind of message between two coordinates or from a coordinate to a neighbour's shadow.

    Micro-batches from ``first`` on travel from ``source`` to ``target`` by ``send`` and ``receive``;
    those under ``available`` are there when the program starts, the others after ``producer``. None from ``end`` on.
    """

    source: WorkerId
    target: WorkerId
    send: Op
    sender: Coordinate
    receive: Op
    receiver: Coordinate
    producer: Op
    consumer: Op
    first: int
    available: int
    to_shadow: bool
    end: int = sys.maxsize

    def sending(self, micro_batch: int) -> Instruction:
        """The SEND of ``micro_batch``."""
        return Instruction(self.send, self.sender, micro_batch, self.to_shadow)

    def receiving(self, micro_batch: int) -> Instruction:
        """The RECV of ``micro_batch``."""
        return Instruction(self.receive, self.receiver, micro_batch, self.to_shadow)


def routes(
    placement: Placement,
    *,
    coordinates: tuple[Coordinate, ...],
    progress: Mapping[Coordinate, CoordinateProgress],
    redundant: Mapping[Coordinate, CoordinateProgress],
    mode: Mode,
    redundant_ends: Mapping[tuple[Op, Coordinate], int],
) -> Iterator[Route]:
    """Every route of a plan. ``redundant_ends``: up to which micro-batch it runs a shadow's FRC and BRC, if any.

    Between neighbour coordinates there is always one, on one worker too. A shadow's pass takes its input
    from the neighbour coordinate when that is on the same worker, as it normally is (DESIGN 2), and
    needs a route otherwise.
    """
    owners, shadows = dict(placement.owners), dict(placement.shadows)
    directions = ((True, -1), (False, 1)) if mode.trains else ((True, -1),)
    stages = placement.grid.stages
    redundant_ops = tuple(mode.redundant_ops_of(stage, stages=stages) for stage in range(stages))
    for c in coordinates:
        for forward, distance in directions:
            neighbour = Coordinate(c.pipeline, c.stage + distance)
            source = owners.get(neighbour)
            if source is None:
                continue
            yield _route(c, neighbour, forward, source, owners[c], progress[neighbour], progress[c], False)
            holder = shadows.get(c)
            consumer = Op.FRC if forward else Op.BRC
            if consumer in redundant_ops[c.stage] and holder is not None and holder != source:
                route = _route(c, neighbour, forward, source, holder, progress[neighbour], redundant[c], True)
                yield route._replace(end=redundant_ends.get((consumer, c), 0))


def _route(
    receiver: Coordinate,
    sender: Coordinate,
    forward: bool,
    source: WorkerId,
    target: WorkerId,
    sent: CoordinateProgress,
    received: CoordinateProgress,
    to_shadow: bool,
) -> Route:
    # By position, in the order of the fields: there is one for each coordinate, direction and plan.
    if forward:
        consumer = Op.FRC if to_shadow else Op.FNC
        first, available = received.activations_received, sent.forwards
        ops = Op.SEND_ACTIVATION, sender, Op.RECV_ACTIVATION, receiver, Op.FNC, consumer
    else:
        consumer = Op.BRC if to_shadow else Op.BNC
        first, available = received.gradients_received, sent.backwards
        ops = Op.SEND_GRAD, sender, Op.RECV_GRAD, receiver, Op.BNC, consumer
    return Route(source, target, *ops, first, available, to_shadow)


def peer(instruction: Instruction, *, placement: Placement) -> WorkerId:
    """The worker at the other end of a SEND or RECV; the one that executes it when both ends are there.

    Raises ValueError for other ops and where there is no neighbour or shadow.
    """
    op, c = instruction.op, instruction.coordinate
    if c is None or op not in SENDS | RECEIVES:
        raise ValueError(f"{instruction} has no peer; only {', '.join(sorted(o.value for o in SENDS | RECEIVES))} have")
    towards_end = op in (Op.SEND_ACTIVATION, Op.RECV_GRAD)
    other = Coordinate(c.pipeline, c.stage + (1 if towards_end else -1))
    if other in placement.grid:
        holder = placement.shadow(other) if instruction.to_shadow and op in SENDS else placement.owner(other)
        if holder is not None:
            return holder
    raise ValueError(f"{instruction} has no peer: the placement has no {'shadow of ' * instruction.to_shadow}{other}")


def lower(
    placement: Placement,
    order: Order,
    *,
    coordinates: tuple[Coordinate, ...],
    progress: Mapping[Coordinate, CoordinateProgress],
    redundant: Mapping[Coordinate, CoordinateProgress],
    mode: Mode,
) -> tuple[tuple[WorkerId, tuple[Instruction, ...]], ...]:
    """The program of every worker in ``order``, in its order. ``redundant`` counts FRC and BRC per shadow."""
    every = tuple(
        routes(
            placement,
            coordinates=coordinates,
            progress=progress,
            redundant=redundant,
            mode=mode,
            redundant_ends=_redundant_ends(order),
        )
    )
    sends, channels = _place_sends(every, order)
    loaded: dict[tuple[Op, Coordinate], int] = {}
    for c in coordinates:
        if c.stage in (0, placement.grid.stages - 1):
            loaded[Op.FNC, c], loaded[Op.FRC, c] = progress[c].loaded, redundant[c].loaded
    tail = tuple(Instruction(op) for op in TAIL) if mode.trains else ()
    receives = _Receives(every, channels)
    programs = []
    for worker, passes in order.items():
        program = list(sends.at_start[worker])
        for _, instruction, _, _ in passes:
            op, coordinate, m, _ = instruction
            assert coordinate is not None and m is not None
            key = op, coordinate
            if key in loaded and m >= loaded[key]:
                # Before the receive, whose wait hides it.
                program.append(Instruction(Op.LOAD, coordinate, m))
            receives.before(key, m, program)
            program.append(instruction)
            for route in sends.after.get(key, ()):
                if route.first <= m < route.end:
                    program.append(route.sending(m))
        programs.append((worker, tuple(program) + tail))
    return tuple(programs)


def _redundant_ends(order: Order) -> Mapping[tuple[Op, Coordinate], int]:
    ends: dict[tuple[Op, Coordinate], int] = {}
    for passes in order.values():
        for _, (op, c, m, _), _, _ in passes:
            if op in (Op.FRC, Op.BRC) and c is not None and m is not None:
                ends[op, c] = max(ends.get((op, c), 0), m + 1)
    return ends


@dataclass(frozen=True)
class _Sends:
    at_start: Mapping[WorkerId, tuple[Instruction, ...]]
    after: Mapping[tuple[Op, Coordinate], tuple[Route, ...]]


_Channel = tuple[WorkerId, WorkerId]


def _place_sends(every: tuple[Route, ...], order: Order) -> tuple[_Sends, Mapping[_Channel, list[tuple[Route, int]]]]:
    """Where each message is sent, and what each channel delivers, in order."""
    after: dict[tuple[Op, Coordinate], tuple[Route, ...]] = {}
    for route in every:
        key = (route.producer, route.sender)
        after[key] = (*after.get(key, ()), route)
    channels: dict[_Channel, list[tuple[Route, int]]] = {}
    at_start: dict[WorkerId, tuple[Instruction, ...]] = dict.fromkeys(order, ())
    for worker, messages in _available(every, order).items():
        at_start[worker] = tuple(route.sending(m) for route, m in messages)
        for route, m in messages:
            channels.setdefault((worker, route.target), []).append((route, m))
    for worker, passes in order.items():
        for _, (op, c, done, _), _, _ in passes:
            assert c is not None and done is not None
            for route in after.get((op, c), ()):
                if route.first <= done < route.end:
                    channels.setdefault((worker, route.target), []).append((route, done))
    return _Sends(at_start, after), channels


def _available(every: tuple[Route, ...], order: Order) -> Mapping[WorkerId, list[tuple[Route, int]]]:
    """What each worker can send at once, in the order in which the receivers will use it."""
    resent = [(route, m) for route in every for m in range(route.first, min(route.available, route.end))]
    if not resent:
        return {}
    receiving = {route.target for route, _ in resent}
    used_at = {
        (op, c, m): (start, position)
        for worker in receiving
        for position, (_, (op, c, m, _), start, _) in enumerate(order[worker])
    }
    resent.sort(key=lambda item: used_at[item[0].consumer, item[0].receiver, item[1]])
    by_source: dict[WorkerId, list[tuple[Route, int]]] = {}
    for route, m in resent:
        by_source.setdefault(route.source, []).append((route, m))
    return by_source


class _Receives:
    """What is left in each channel while the programs are written; never seen outside of :func:`lower`."""

    def __init__(self, every: tuple[Route, ...], channels: Mapping[_Channel, list[tuple[Route, int]]]) -> None:
        self.queues = {channel: iter(messages) for channel, messages in channels.items()}
        self.inputs = {(route.consumer, route.receiver): route for route in every}
        self.received = {key: route.first for key, route in self.inputs.items()}

    def before(self, key: tuple[Op, Coordinate], micro_batch: int, program: list[Instruction]) -> None:
        """Append to ``program`` the receives that must come right before this pass."""
        route = self.inputs.get(key)
        while route is not None and self.received[key] <= micro_batch:
            delivered, m = next(self.queues[route.source, route.target])
            self.received[delivered.consumer, delivered.receiver] = m + 1
            program.append(delivered.receiving(m))
