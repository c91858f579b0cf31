"""Lowering: compute orders -> programs, by adding loads, sends, receives and the tail.

On every ordered pair of workers messages arrive in the order in which they were sent, and a receive takes
the head. So the sends are placed first (right after what they send; what an interrupted iteration already
has, at the start) and each receive right before its consumer, together with everything that its channel
delivers before it. That can't add a wait: those messages were sent earlier by the same worker.
"""

from __future__ import annotations

import sys
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from deepspeed_bamboo.core.grid import Coordinate
from deepspeed_bamboo.core.instructions import RECEIVES, SENDS, TAIL, Instruction, Op, row
from deepspeed_bamboo.core.placement import Placement, WorkerId
from deepspeed_bamboo.core.progress import CoordinateProgress
from deepspeed_bamboo.core.schedule import Mode
from deepspeed_bamboo.core.timeline import Order


class Route(NamedTuple):
    """One kind of message between two coordinates or from a coordinate to a neighbour's shadow.

    Micro-batches from ``first`` on travel from ``source`` to ``target`` by ``sends`` and ``receives``, which have one
    instruction for each; those under ``available`` are there when the program starts, the others after ``producer``
    of ``sender``. None from ``end`` on. ``consumer`` of ``receiver`` uses them.
    """

    source: WorkerId
    target: WorkerId
    sender: Coordinate
    receiver: Coordinate
    producer: Op
    consumer: Op
    first: int
    available: int
    to_shadow: bool
    sends: tuple[Instruction, ...]
    receives: tuple[Instruction, ...]
    end: int = sys.maxsize


def routes(
    placement: Placement,
    *,
    coordinates: tuple[Coordinate, ...],
    micro_batches: int,
    progress: Mapping[Coordinate, CoordinateProgress],
    redundant: Mapping[Coordinate, CoordinateProgress],
    mode: Mode,
    redundant_ends: Mapping[tuple[Op, Coordinate], int],
) -> Iterator[Route]:
    """Every route of a plan. ``redundant_ends``: up to which micro-batch it runs a shadow's FRC and BRC, if any.

    Between neighbour coordinates there is always one, on one worker too. A shadow's pass takes its input
    from the neighbour coordinate when that is on the same worker, as it normally is (architecture 2), and
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
            yield _route(
                c, neighbour, forward, source, owners[c], progress[neighbour], progress[c], micro_batches, False
            )
            holder = shadows.get(c)
            consumer = Op.FRC if forward else Op.BRC
            if consumer in redundant_ops[c.stage] and holder is not None and holder != source:
                route = _route(
                    c, neighbour, forward, source, holder, progress[neighbour], redundant[c], micro_batches, True
                )
                yield route._replace(end=redundant_ends.get((consumer, c), 0))


def _route(
    receiver: Coordinate,
    sender: Coordinate,
    forward: bool,
    source: WorkerId,
    target: WorkerId,
    sent: CoordinateProgress,
    received: CoordinateProgress,
    micro_batches: int,
    to_shadow: bool,
) -> Route:
    # By position, in the order of the fields: there is one for each coordinate, direction and plan.
    if forward:
        consumer = Op.FRC if to_shadow else Op.FNC
        first, available = received.activations_received, sent.forwards
        producer, send, receive = Op.FNC, Op.SEND_ACTIVATION, Op.RECV_ACTIVATION
    else:
        consumer = Op.BRC if to_shadow else Op.BNC
        first, available = received.gradients_received, sent.backwards
        producer, send, receive = Op.BNC, Op.SEND_GRAD, Op.RECV_GRAD
    sends = row(send, sender, micro_batches, to_shadow)
    receives = row(receive, receiver, micro_batches, to_shadow)
    return Route(source, target, sender, receiver, producer, consumer, first, available, to_shadow, sends, receives)


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
    micro_batches: int,
    progress: Mapping[Coordinate, CoordinateProgress],
    redundant: Mapping[Coordinate, CoordinateProgress],
    mode: Mode,
) -> tuple[tuple[WorkerId, tuple[Instruction, ...]], ...]:
    """The program of every worker in ``order``, in its order. ``redundant`` counts FRC and BRC per shadow."""
    every = tuple(
        routes(
            placement,
            coordinates=coordinates,
            micro_batches=micro_batches,
            progress=progress,
            redundant=redundant,
            mode=mode,
            redundant_ends=_redundant_ends(order) if mode.redundant_ops else {},
        )
    )
    kinds = _kinds(every)
    for c in coordinates:
        if c.stage in (0, placement.grid.stages - 1):
            for op, counts in ((Op.FNC, progress[c]), (Op.FRC, redundant[c])):
                kinds[op, c].loads = row(Op.LOAD, c, micro_batches)
                kinds[op, c].loaded = counts.loaded
    steps: dict[WorkerId, list[tuple[_Kind, Instruction]]] = {
        worker: [(kinds[instruction[:2]], instruction) for _, instruction, _, _ in passes]  # type: ignore[index]
        for worker, passes in order.items()
    }
    at_start = _place_sends(kinds, every, order, steps)
    tail = tuple(Instruction(op) for op in TAIL) if mode.trains else ()
    return tuple(
        (worker, (*at_start.get(worker, ()), *_with_communication(its_steps), *tail))
        for worker, its_steps in steps.items()
    )


def _redundant_ends(order: Order) -> Mapping[tuple[Op, Coordinate], int]:
    ends: dict[tuple[Op, Coordinate], int] = {}
    for passes in order.values():
        for _, (op, c, m, _), _, _ in passes:
            if op in (Op.FRC, Op.BRC) and c is not None and m is not None:
                ends[op, c] = max(ends.get((op, c), 0), m + 1)
    return ends


@dataclass(slots=True, eq=False)
class _Kind:
    """What goes before and after the passes of one op and coordinate: never seen outside of :func:`lower`.

    ``loaded`` and ``received`` count up while the programs are written. ``channel`` is what is left to receive from
    the worker that sends its input, in the order in which it is sent: whose input it is, and the micro-batch.
    """

    loads: tuple[Instruction, ...] = ()
    loaded: int = 0
    receives: tuple[Instruction, ...] = ()
    received: int = sys.maxsize
    channel: deque[tuple[_Kind, int]] = field(default_factory=deque)
    outgoing: list[tuple[Route, _Kind]] = field(default_factory=list)


_Kinds = Mapping[tuple[Op, Coordinate], _Kind]


def _kinds(every: tuple[Route, ...]) -> _Kinds:
    """The kinds of passes, with what they receive and send."""
    kinds: dict[tuple[Op, Coordinate], _Kind] = defaultdict(_Kind)
    channels: dict[tuple[WorkerId, WorkerId], deque[tuple[_Kind, int]]] = defaultdict(deque)
    for route in every:
        consumer = kinds[route.consumer, route.receiver]
        consumer.receives = route.receives
        consumer.received = route.first
        consumer.channel = channels[route.source, route.target]
        kinds[route.producer, route.sender].outgoing.append((route, consumer))
    return kinds


def _place_sends(
    kinds: _Kinds,
    every: tuple[Route, ...],
    order: Order,
    steps: Mapping[WorkerId, list[tuple[_Kind, Instruction]]],
) -> Mapping[WorkerId, tuple[Instruction, ...]]:
    """Fill the channels; returns what each worker sends at the start of its program."""
    available = _available(every, order)
    for messages in available.values():
        for route, m in messages:
            consumer = kinds[route.consumer, route.receiver]
            consumer.channel.append((consumer, m))
    for its_steps in steps.values():
        for kind, (_, _, done, _) in its_steps:
            assert done is not None
            for route, consumer in kind.outgoing:
                if route.first <= done < route.end:
                    consumer.channel.append((consumer, done))
    return {worker: tuple(route.sends[m] for route, m in messages) for worker, messages in available.items()}


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


def _with_communication(steps: list[tuple[_Kind, Instruction]]) -> list[Instruction]:
    """The passes of one worker with the loads, receives and sends that go with them."""
    program: list[Instruction] = []
    for kind, instruction in steps:
        m = instruction[2]
        assert m is not None
        if kind.loads and m >= kind.loaded:
            program.append(kind.loads[m])  # before the receive, whose wait hides it
        while kind.received <= m:
            delivered, number = kind.channel.popleft()
            delivered.received = number + 1
            program.append(delivered.receives[number])
        program.append(instruction)
        for route, _ in kind.outgoing:
            if route.first <= m < route.end:
                program.append(route.sends[m])
    return program
