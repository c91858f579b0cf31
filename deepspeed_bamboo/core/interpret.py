"""A pure interpreter for plans: runs all programs against each other, checking every rule at every instruction.

Programs that communicate by unidirectional queues with blocking receives give the same result in every
interleaving, so one run covers them all (Kahn, 1974). What it computes is who has done what, and when.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from deepspeed_bamboo.core.debts import Debts
from deepspeed_bamboo.core.grid import Coordinate
from deepspeed_bamboo.core.instructions import TAIL, Instruction, Op
from deepspeed_bamboo.core.placement import WorkerId
from deepspeed_bamboo.core.progress import CoordinateProgress, shadow_progress
from deepspeed_bamboo.core.schedule import Plan
from deepspeed_bamboo.core.schedule_error import schedule_error
from deepspeed_bamboo.core.timeline import Costs, Timed


@dataclass(frozen=True)
class Execution:
    """What running a plan, or a part of it, has done.

    ``timeline`` is in an order in which it could have happened one by one. ``redundant`` counts, for
    every shadow, FRC as forwards and BRC as backwards. ``waiting`` holds the workers that did not
    reach their end or stop, with the instruction at which they wait. ``in_flight`` are messages sent
    and not received, as the RECV that would take them.
    """

    timeline: tuple[Timed, ...]
    progress: Mapping[Coordinate, CoordinateProgress]
    redundant: Mapping[Coordinate, CoordinateProgress]
    positions: Mapping[WorkerId, int]
    waiting: Mapping[WorkerId, Instruction]
    in_flight: tuple[tuple[WorkerId, WorkerId, Instruction], ...]


def interpret(
    plan: Plan,
    *,
    progress: Mapping[Coordinate, CoordinateProgress] | None = None,
    redundant: Mapping[Coordinate, CoordinateProgress] | None = None,
    costs: Costs | None = None,
    stops: Mapping[WorkerId, int] | None = None,
    until: int | None = None,
) -> Execution:
    """Run ``plan`` from ``progress`` until every worker is at its end, at its stop, or waits for ever.

    ``redundant`` says how many FRC (forwards) and BRC (backwards) each shadow has already.

    ``stops`` gives workers the number of instructions after which they stop; ``until`` stops
    everyone before an instruction that would end after that slot. Every consistent cut of an
    interrupted iteration is the result of some ``stops``. Raises ScheduleError at the first broken rule.
    """
    machine = _Machine(plan, progress or {}, redundant or {}, costs or Costs())
    return machine.run(stops or {}, until)


class _BrokenError(Exception):
    """Internal: the rule that the current instruction breaks."""


class _State:
    """Counts of one coordinate or shadow while the plan runs, and the worker that holds it."""

    __slots__ = (
        "activations_received",
        "backwards",
        "first",
        "forwards",
        "gradients_received",
        "holder",
        "last",
        "loaded",
        "loads",
    )

    def __init__(self, counts: CoordinateProgress, *, holder: WorkerId, first: bool, last: bool) -> None:
        self.loaded, self.activations_received, self.forwards, self.gradients_received, self.backwards = counts
        self.holder = holder
        self.first = first
        self.last = last
        self.loads = first or last

    def freeze(self) -> CoordinateProgress:
        return CoordinateProgress(
            self.loaded, self.activations_received, self.forwards, self.gradients_received, self.backwards
        )


class _Channel:
    """The queue from one worker to another. ``waiter`` is the receiver when it waits for the next message."""

    __slots__ = ("messages", "waiter")

    def __init__(self) -> None:
        self.messages: deque[tuple[_Route, int, int]] = deque()  # route, micro-batch, time
        self.waiter: WorkerId | None = None


@dataclass(slots=True, eq=False)
class _Route:
    """One kind of message: from a coordinate to a neighbour, or to the neighbour's shadow. ``unsent`` counts up."""

    forward: bool
    source: WorkerId
    target: WorkerId
    receiver: Coordinate
    to_shadow: bool
    sender_state: _State
    receiver_state: _State
    channel: _Channel
    unsent: int

    def receiving(self, micro_batch: int) -> Instruction:
        op = Op.RECV_ACTIVATION if self.forward else Op.RECV_GRAD
        return Instruction(op, self.receiver, micro_batch, self.to_shadow)


_Handler = Callable[[WorkerId, Instruction], bool]


class _Machine:
    """All that changes during one call of :func:`interpret`; never seen outside of it."""

    def __init__(
        self,
        plan: Plan,
        progress: Mapping[Coordinate, CoordinateProgress],
        redundant: Mapping[Coordinate, CoordinateProgress],
        costs: Costs,
    ) -> None:
        covered = frozenset(plan.pipelines)
        self.plan = plan
        self.micro_batches = plan.micro_batches
        self.last_stage = last = plan.placement.grid.stages - 1
        start = CoordinateProgress()
        self.own = {
            c: _State(progress.get(c, start), holder=w, first=c.stage == 0, last=c.stage == last)
            for c, w in plan.placement.owners
            if c.pipeline in covered
        }
        self.red = {
            c: _State(
                shadow_progress(c, redundant.get(c, start), last_stage=last),
                holder=w,
                first=c.stage == 0,
                last=c.stage == last,
            )
            for c, w in plan.placement.shadows
            if c.pipeline in covered
        }
        # Of the shadows those for which the plan runs anything.
        self.running = {
            c: state for c, state in self.red.items() if plan.mode.redundant_ops_of(c.stage, stages=last + 1)
        }
        self.channels: dict[tuple[WorkerId, WorkerId], _Channel] = {}
        self.routes = self._routes()
        self.programs = dict(plan.programs)
        self.debts = Debts(plan, own=self.own, red=self.red)
        self.position = dict.fromkeys(self.programs, 0)
        self.clock = dict.fromkeys(self.programs, 0)
        self.tail = dict.fromkeys(self.programs, 0)
        self.committing: set[WorkerId] = set()
        self.agreed = False
        self.runnable = deque(self.programs)
        self.timeline: list[Timed] = []
        by_op = costs.by_op()
        self.actions = {op: (handler, by_op.get(op, 0)) for op, handler in self._handlers().items()}

    def _handlers(self) -> Mapping[Op, _Handler]:
        return {
            Op.LOAD: self._load,
            Op.FNC: self._forward,
            Op.BNC: self._backward,
            Op.FRC: self._redundant_forward,
            Op.BRC: self._redundant_backward,
            Op.SEND_ACTIVATION: self._send,
            Op.SEND_GRAD: self._send,
            Op.RECV_ACTIVATION: self._receive,
            Op.RECV_GRAD: self._receive,
        } | dict.fromkeys(TAIL, self._end)

    def run(self, stops: Mapping[WorkerId, int], until: int | None) -> Execution:
        waiting: dict[WorkerId, Instruction] = {}
        while self.runnable:
            worker = self.runnable.popleft()
            waiting.pop(worker, None)
            blocked = self._run_worker(worker, stops.get(worker), until)
            if blocked is not None:
                waiting[worker] = blocked
        return Execution(
            timeline=tuple(self.timeline),
            progress={c: state.freeze() for c, state in self.own.items()},
            redundant={c: state.freeze() for c, state in self.red.items()},
            positions=self.position,
            waiting=waiting,
            in_flight=tuple(
                (source, target, route.receiving(m))
                for (source, target), channel in self.channels.items()
                for route, m, _ in channel.messages
            ),
        )

    def _routes(self) -> dict[tuple[Op, Coordinate, bool], _Route]:
        """Every route twice: by the sender's and by the receiver's op, coordinate and flag."""
        routes: dict[tuple[Op, Coordinate, bool], _Route] = {}
        for to_shadow, states in ((False, self.own), (True, self.running)):
            for receiver, state in states.items():
                for forward, distance in ((True, -1), (False, 1)):
                    sender = Coordinate(receiver.pipeline, receiver.stage + distance)
                    sending = self.own.get(sender)
                    # A shadow takes its neighbour's tensors directly when both are on one worker.
                    if sending is None or (to_shadow and sending.holder == state.holder):
                        continue
                    pair = sending.holder, state.holder
                    if pair not in self.channels:
                        self.channels[pair] = _Channel()
                    route = _Route(
                        forward,
                        *pair,
                        receiver,
                        to_shadow,
                        sending,
                        state,
                        self.channels[pair],
                        state.activations_received if forward else state.gradients_received,
                    )
                    routes[Op.SEND_ACTIVATION if forward else Op.SEND_GRAD, sender, to_shadow] = route
                    routes[Op.RECV_ACTIVATION if forward else Op.RECV_GRAD, receiver, to_shadow] = route
        return routes

    def _run_worker(self, worker: WorkerId, stop: int | None, until: int | None) -> Instruction | None:
        """Run one worker as far as it goes; returns the instruction at which it waits, if it does."""
        program, clock, actions, note = self.programs[worker], self.clock, self.actions, self.timeline.append
        new = tuple.__new__  # half the time of Timed(...), and there is one for each instruction
        first = self.position[worker]
        last = len(program) if stop is None else min(stop, len(program))
        for position in range(first, last):
            instruction = program[position]
            handler, cost = actions[instruction.op]
            if until is not None and clock[worker] + cost > until:
                self.position[worker] = position
                return None
            try:
                went_on = handler(worker, instruction)
            except _BrokenError as broken:
                rule = str(broken)
                raise schedule_error(rule, self.plan, self.timeline, worker=worker, instruction=instruction) from None
            if not went_on:
                self.position[worker] = position
                return instruction
            start = end = clock[worker]
            if cost:
                clock[worker] = end = start + cost
            note(new(Timed, (worker, instruction, start, end)))
        self.position[worker] = max(first, last)
        return None

    # One handler per op: returns whether the worker goes on, raises _BrokenError for a broken rule.

    def _load(self, worker: WorkerId, instruction: Instruction) -> bool:
        _, c, m, _ = instruction
        state = self.own.get(c)  # type: ignore[arg-type]
        if state is None or state.holder != worker:
            state = self._shadow(worker, instruction)
        if m != state.loaded or m >= self.micro_batches or self.tail[worker]:
            raise self._misplaced(worker, instruction, "loads", state.loaded)
        if not state.loads:
            raise _BrokenError("only the first and the last stage load")
        state.loaded = m + 1
        return True

    def _forward(self, worker: WorkerId, instruction: Instruction) -> bool:
        _, c, m, _ = instruction
        state = self.own.get(c)  # type: ignore[arg-type]
        if state is None or state.holder != worker:
            raise self._not_owned(instruction, state)
        if m != state.forwards or m >= self.micro_batches or self.tail[worker]:
            raise self._misplaced(worker, instruction, "forwards", state.forwards)
        if m >= state.activations_received and not state.first:
            raise _BrokenError(f"the activation of micro-batch {m} is not received")
        if state.loads and m >= state.loaded:
            raise _BrokenError(f"micro-batch {m} is not loaded")
        state.forwards = m + 1
        return True

    def _backward(self, worker: WorkerId, instruction: Instruction) -> bool:
        _, c, m, _ = instruction
        state = self.own.get(c)  # type: ignore[arg-type]
        if state is None or state.holder != worker:
            raise self._not_owned(instruction, state)
        if m != state.backwards or m >= self.micro_batches or self.tail[worker]:
            raise self._misplaced(worker, instruction, "backwards", state.backwards)
        if m >= state.forwards:
            raise _BrokenError(f"the forward of micro-batch {m} is not done")
        if m >= state.gradients_received and not state.last:
            raise _BrokenError(f"the gradient of micro-batch {m} is not received")
        state.backwards = m + 1
        return True

    def _redundant_forward(self, worker: WorkerId, instruction: Instruction) -> bool:
        state = self._shadow(worker, instruction)
        _, c, m, _ = instruction
        if m != state.forwards or m >= self.micro_batches or self.tail[worker]:
            raise self._misplaced(worker, instruction, "redundant forwards", state.forwards)
        if not state.first and c is not None:
            before = Coordinate(c.pipeline, c.stage - 1)
            here = self.own[before]
            if m >= (here.forwards if here.holder == worker else state.activations_received):
                raise _BrokenError(f"the activation of micro-batch {m} from {before} is not on worker {worker}")
        if state.loads and m >= state.loaded:
            raise _BrokenError(f"micro-batch {m} is not loaded")
        state.forwards = m + 1
        return True

    def _redundant_backward(self, worker: WorkerId, instruction: Instruction) -> bool:
        state = self._shadow(worker, instruction)
        _, c, m, _ = instruction
        if m != state.backwards or m >= self.micro_batches or self.tail[worker]:
            raise self._misplaced(worker, instruction, "redundant backwards", state.backwards)
        if m >= state.forwards:
            raise _BrokenError(f"the redundant forward of micro-batch {m} is not done")
        if not state.last and c is not None:
            behind = Coordinate(c.pipeline, c.stage + 1)
            here = self.own[behind]
            if m >= (here.backwards if here.holder == worker else state.gradients_received):
                raise _BrokenError(f"the gradient of micro-batch {m} from {behind} is not on worker {worker}")
        state.backwards = m + 1
        return True

    def _send(self, worker: WorkerId, instruction: Instruction) -> bool:
        op, c, m, to_shadow = instruction
        route = self.routes.get((op, c, to_shadow))  # type: ignore[arg-type]
        if route is None or route.source != worker:
            raise self._no_route(instruction, None if route is None else route.source)
        computed = route.sender_state.forwards if route.forward else route.sender_state.backwards
        if m != route.unsent or m >= computed or self.tail[worker]:
            misplaced = self._misplaced(worker, instruction, "sends", route.unsent)
            early = m is not None and computed <= m < self.micro_batches and not self.tail[worker]
            raise _BrokenError(f"micro-batch {m} is not computed yet") if early else misplaced
        route.unsent = m + 1
        channel = route.channel
        channel.messages.append((route, m, self.clock[worker]))
        if channel.waiter is not None:
            self.runnable.append(channel.waiter)
            channel.waiter = None
        return True

    def _receive(self, worker: WorkerId, instruction: Instruction) -> bool:
        op, c, m, to_shadow = instruction
        route = self.routes.get((op, c, to_shadow))  # type: ignore[arg-type]
        if route is None or route.target != worker:
            raise self._no_route(instruction, None if route is None else route.target)
        state = route.receiver_state
        expected = state.activations_received if route.forward else state.gradients_received
        if m != expected or m >= self.micro_batches or self.tail[worker]:
            raise self._misplaced(worker, instruction, "receives", expected)
        channel = route.channel
        if not channel.messages:
            channel.waiter = worker
            return False
        head, delivered, sent_at = channel.messages[0]
        if head is not route or delivered != m:
            raise _BrokenError(f"the channel from {route.source} delivers {head.receiving(delivered)} first")
        channel.messages.popleft()
        if sent_at > self.clock[worker]:
            self.clock[worker] = sent_at
        if route.forward:
            state.activations_received = m + 1
        else:
            state.gradients_received = m + 1
        return True

    def _end(self, worker: WorkerId, instruction: Instruction) -> bool:
        """The ops of the tail, each once, in order, when all that the worker holds is complete."""
        if not self.plan.mode.trains:
            raise _BrokenError("a plan without backwards has no tail")
        expected = TAIL[self.tail[worker]] if self.tail[worker] < len(TAIL) else None
        if instruction.op is not expected:
            raise _BrokenError(f"the tail is {', '.join(op.value for op in TAIL)}, in this order, once")
        if self.tail[worker] == 0:
            missing = self.debts.of(worker)
            if missing:
                raise _BrokenError(missing)
        if instruction.op is Op.COMMIT:
            # The agreement of all workers: nobody goes on before everybody is here.
            self.committing.add(worker)
            if len(self.committing) < len(self.programs):
                return False
            if not self.agreed:
                self.agreed = True
                self.clock.update(dict.fromkeys(self.programs, max(self.clock.values())))
                self.runnable.extend(w for w in self.programs if w != worker)
        self.tail[worker] += 1
        return True

    def _shadow(self, worker: WorkerId, instruction: Instruction) -> _State:
        state = self.running.get(instruction.coordinate)  # type: ignore[arg-type]
        if state is None or state.holder != worker:
            self._require_place(instruction)
            raise _BrokenError(f"the plan runs no shadow of {instruction.coordinate} on worker {worker}")
        return state

    # What an instruction breaks that is not where, or not when, it may be.

    def _misplaced(self, worker: WorkerId, instruction: Instruction, what: str, expected: int) -> _BrokenError:
        if self.tail[worker]:
            last = TAIL[self.tail[worker] - 1].value
            return _BrokenError(f"nothing comes after {last} but the rest of the tail")
        self._require_place(instruction)
        return _BrokenError(f"{what} go in micro-batch order, each once: next is {expected}")

    def _not_owned(self, instruction: Instruction, state: _State | None) -> _BrokenError:
        self._require_place(instruction)
        return _BrokenError(f"{instruction.coordinate} belongs to worker {state.holder if state else None}")

    def _no_route(self, instruction: Instruction, holder: WorkerId | None) -> _BrokenError:
        self._require_place(instruction)
        if holder is not None:
            return _BrokenError(f"{instruction.coordinate} belongs to worker {holder}")
        return _BrokenError("there is no neighbour for it" + (" that needs it" if instruction.to_shadow else ""))

    def _require_place(self, instruction: Instruction) -> None:
        c, m = instruction.coordinate, instruction.micro_batch
        if c is None or m is None or c not in self.own or not 0 <= m < self.micro_batches:
            raise _BrokenError(f"it needs a coordinate of the plan and a micro-batch in 0..{self.micro_batches - 1}")
