"""A pure interpreter for plans: runs all programs against each other, checking every rule at every instruction.

Programs that communicate by unidirectional queues with blocking receives give the same result in every
interleaving, so one run covers them all (Kahn, 1974). What it computes is who has done what, and when.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from deepspeed_bamboo.core.grid import Coordinate
from deepspeed_bamboo.core.instructions import TAIL, Instruction, Op
from deepspeed_bamboo.core.placement import WorkerId
from deepspeed_bamboo.core.progress import CoordinateProgress, shadow_progress
from deepspeed_bamboo.core.render import text_grid
from deepspeed_bamboo.core.schedule import Plan
from deepspeed_bamboo.core.timeline import Costs, Timed


class ScheduleError(Exception):
    """A plan breaks a rule. ``worker`` and ``instruction`` are the guilty ones, ``rule`` says what they break.

    The message draws the grid up to there, with the guilty cell marked by ``!``.
    """

    def __init__(self, rule: str, *, worker: WorkerId, instruction: Instruction | None, picture: str) -> None:
        where = "at the end of its program" if instruction is None else f"at {instruction}"
        super().__init__(f"worker {worker} {where}: {rule}\n{picture}")
        self.rule = rule
        self.worker = worker
        self.instruction = instruction


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
    """Counts of one coordinate or shadow while the plan runs."""

    __slots__ = ("activations_received", "backwards", "forwards", "gradients_received", "loaded")

    def __init__(self, counts: CoordinateProgress) -> None:
        self.loaded = counts.loaded
        self.activations_received = counts.activations_received
        self.forwards = counts.forwards
        self.gradients_received = counts.gradients_received
        self.backwards = counts.backwards

    def freeze(self) -> CoordinateProgress:
        return CoordinateProgress(
            self.loaded, self.activations_received, self.forwards, self.gradients_received, self.backwards
        )


@dataclass
class _Channel:
    """The queue from one worker to another. ``waiter`` is the receiver when it waits for the next message."""

    messages: deque[tuple[_Route, int, int]]  # route, micro-batch, time
    waiter: WorkerId | None = None


@dataclass
class _Route:
    """One kind of message: from a coordinate to a neighbour, or to the neighbour's shadow. ``unsent`` counts up."""

    receive: Op
    source: WorkerId
    target: WorkerId
    receiver: Coordinate
    to_shadow: bool
    sender_state: _State
    receiver_state: _State
    channel: _Channel
    unsent: int

    def receiving(self, micro_batch: int) -> Instruction:
        return Instruction(self.receive, self.receiver, micro_batch, self.to_shadow)


class _Machine:
    """All that changes during one call of :func:`interpret`; never seen outside of it."""

    def __init__(
        self,
        plan: Plan,
        progress: Mapping[Coordinate, CoordinateProgress],
        redundant: Mapping[Coordinate, CoordinateProgress],
        costs: Costs,
    ) -> None:
        covered = frozenset(plan.coordinates)
        self.plan = plan
        self.redundant_ops = plan.mode.redundant_ops
        self.last_stage = plan.placement.grid.stages - 1
        self.owners = {c: w for c, w in plan.placement.owners if c in covered}
        self.shadows = {c: w for c, w in plan.placement.shadows if c in covered}
        start = CoordinateProgress()
        self.before = {c: Coordinate(c.pipeline, c.stage - 1) for c in self.owners}
        self.behind = {c: Coordinate(c.pipeline, c.stage + 1) for c in self.owners}
        self.own = {c: _State(progress.get(c, start)) for c in self.owners}
        self.red = {
            c: _State(shadow_progress(c, redundant.get(c, start), last_stage=self.last_stage)) for c in self.shadows
        }
        self.channels: dict[tuple[WorkerId, WorkerId], _Channel] = {}
        self.routes = self._routes()
        self.programs = dict(plan.programs)
        self.position = dict.fromkeys(self.programs, 0)
        self.clock = dict.fromkeys(self.programs, 0)
        self.tail = dict.fromkeys(self.programs, 0)
        self.committing: set[WorkerId] = set()
        self.runnable = deque(self.programs)
        self.timeline: list[Timed] = []
        self.costs = dict.fromkeys(Op, 0) | costs.by_op()
        self.handlers = {
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
        shadows = self.shadows if self.redundant_ops else {}
        for to_shadow, holders, states in ((False, self.owners, self.own), (True, shadows, self.red)):
            for receiver, target in holders.items():
                state = states[receiver]
                for forward, sender in ((True, self.before[receiver]), (False, self.behind[receiver])):
                    source = self.owners.get(sender)
                    # A shadow takes its neighbour's tensors directly when both are on one worker.
                    if source is None or (to_shadow and source == target):
                        continue
                    route = _Route(
                        Op.RECV_ACTIVATION if forward else Op.RECV_GRAD,
                        source,
                        target,
                        receiver,
                        to_shadow,
                        self.own[sender],
                        state,
                        self.channels.setdefault((source, target), _Channel(deque())),
                        state.activations_received if forward else state.gradients_received,
                    )
                    routes[Op.SEND_ACTIVATION if forward else Op.SEND_GRAD, sender, to_shadow] = route
                    routes[route.receive, receiver, to_shadow] = route
        return routes

    def _run_worker(self, worker: WorkerId, stop: int | None, until: int | None) -> Instruction | None:
        """Run one worker as far as it goes; returns the instruction at which it waits, if it does."""
        program, clock, costs, handlers = self.programs[worker], self.clock, self.costs, self.handlers
        position = self.position[worker]
        end = len(program) if stop is None else min(stop, len(program))
        blocked: Instruction | None = None
        while position < end:
            instruction = program[position]
            op = instruction.op
            cost = costs[op]
            if until is not None and clock[worker] + cost > until:
                break
            try:
                went_on = handlers[op](worker, instruction)
            except _BrokenError as broken:
                rule = str(broken)
                raise schedule_error(rule, self.plan, self.timeline, worker=worker, instruction=instruction) from None
            if not went_on:
                blocked = instruction
                break
            start = clock[worker]
            clock[worker] = start + cost
            self.timeline.append(Timed(worker, instruction, start, start + cost))
            position += 1
        self.position[worker] = position
        return blocked

    # One handler per op: returns whether the worker goes on, raises _BrokenError for a broken rule.

    def _load(self, worker: WorkerId, instruction: Instruction) -> bool:
        c, m = self._target(worker, instruction)
        state = self.own[c] if self.owners[c] == worker else self._shadow(worker, c)
        if c.stage not in (0, self.last_stage):
            raise _BrokenError("only the first and the last stage load")
        if m != (expected := state.loaded):
            raise _out_of_order("loads", expected)
        state.loaded += 1
        return True

    def _forward(self, worker: WorkerId, instruction: Instruction) -> bool:
        c, m = self._target(worker, instruction)
        state = self._owned(worker, c)
        if m != (expected := state.forwards):
            raise _out_of_order("forwards", expected)
        if c.stage > 0 and m >= state.activations_received:
            raise _BrokenError(f"the activation of micro-batch {m} is not received")
        if m >= state.loaded and c.stage in (0, self.last_stage):
            raise _BrokenError(f"micro-batch {m} is not loaded")
        state.forwards += 1
        return True

    def _backward(self, worker: WorkerId, instruction: Instruction) -> bool:
        c, m = self._target(worker, instruction)
        state = self._owned(worker, c)
        if m != (expected := state.backwards):
            raise _out_of_order("backwards", expected)
        if m >= state.forwards:
            raise _BrokenError(f"the forward of micro-batch {m} is not done")
        if c.stage < self.last_stage and m >= state.gradients_received:
            raise _BrokenError(f"the gradient of micro-batch {m} is not received")
        state.backwards += 1
        return True

    def _redundant_forward(self, worker: WorkerId, instruction: Instruction) -> bool:
        c, m = self._target(worker, instruction)
        state = self._shadow(worker, c)
        if m != (expected := state.forwards):
            raise _out_of_order("redundant forwards", expected)
        if c.stage > 0:
            before = self.before[c]
            have = self.own[before].forwards if self.owners[before] == worker else state.activations_received
            if m >= have:
                raise _BrokenError(f"the activation of micro-batch {m} from {before} is not on worker {worker}")
        if m >= state.loaded and c.stage in (0, self.last_stage):
            raise _BrokenError(f"micro-batch {m} is not loaded")
        state.forwards += 1
        return True

    def _redundant_backward(self, worker: WorkerId, instruction: Instruction) -> bool:
        c, m = self._target(worker, instruction)
        state = self._shadow(worker, c)
        if m != (expected := state.backwards):
            raise _out_of_order("redundant backwards", expected)
        if m >= state.forwards:
            raise _BrokenError(f"the redundant forward of micro-batch {m} is not done")
        if c.stage < self.last_stage:
            behind = self.behind[c]
            have = self.own[behind].backwards if self.owners[behind] == worker else state.gradients_received
            if m >= have:
                raise _BrokenError(f"the gradient of micro-batch {m} from {behind} is not on worker {worker}")
        state.backwards += 1
        return True

    def _send(self, worker: WorkerId, instruction: Instruction) -> bool:
        c, m = self._target(worker, instruction)
        route = self._route(instruction, c)
        if route.source != worker:
            raise _BrokenError(f"{c} belongs to worker {route.source}")
        state = route.sender_state
        if m >= (state.forwards if route.receive is Op.RECV_ACTIVATION else state.backwards):
            raise _BrokenError(f"micro-batch {m} is not computed yet")
        if m != (expected := route.unsent):
            raise _out_of_order("sends", expected)
        route.unsent += 1
        channel = route.channel
        channel.messages.append((route, m, self.clock[worker]))
        if channel.waiter is not None:
            self.runnable.append(channel.waiter)
            channel.waiter = None
        return True

    def _receive(self, worker: WorkerId, instruction: Instruction) -> bool:
        c, m = self._target(worker, instruction)
        route = self._route(instruction, c)
        if route.target != worker:
            raise _BrokenError(f"{c} belongs to worker {route.target}")
        state, forward = route.receiver_state, route.receive is Op.RECV_ACTIVATION
        if m != (expected := state.activations_received if forward else state.gradients_received):
            raise _out_of_order("receives", expected)
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
        if forward:
            state.activations_received += 1
        else:
            state.gradients_received += 1
        return True

    def _route(self, instruction: Instruction, coordinate: Coordinate) -> _Route:
        route = self.routes.get((instruction.op, coordinate, instruction.to_shadow))
        if route is None:
            raise _BrokenError("there is no neighbour for it" + (" that needs it" if instruction.to_shadow else ""))
        return route

    def _end(self, worker: WorkerId, instruction: Instruction) -> bool:
        """The ops of the tail, each once, in order, when all that the worker holds is complete."""
        if not self.plan.mode.trains:
            raise _BrokenError("a plan without backwards has no tail")
        expected = TAIL[self.tail[worker]] if self.tail[worker] < len(TAIL) else None
        if instruction.op is not expected:
            raise _BrokenError(f"the tail is {', '.join(op.value for op in TAIL)}, in this order, once")
        if self.tail[worker] == 0:
            missing = unfinished(self.plan, worker, own=self.own, red=self.red)
            if missing:
                raise _BrokenError(missing)
        if instruction.op is Op.COMMIT:
            # The agreement of all workers: nobody goes on before everybody is here.
            self.committing.add(worker)
            if len(self.committing) < len(self.programs):
                return False
            now = max(self.clock.values())
            others = [w for w in self.programs if w != worker and self.tail[w] == TAIL.index(Op.COMMIT)]
            self.clock.update(dict.fromkeys(self.programs, now))
            self.runnable.extend(others)
        self.tail[worker] += 1
        return True

    # What handlers check.

    def _target(self, worker: WorkerId, instruction: Instruction) -> tuple[Coordinate, int]:
        c, m = instruction.coordinate, instruction.micro_batch
        if self.tail[worker]:
            raise _BrokenError(f"nothing comes after {TAIL[self.tail[worker] - 1].value} but the rest of the tail")
        if c is None or m is None or c not in self.owners or not 0 <= m < self.plan.micro_batches:
            raise _BrokenError(
                f"it needs a coordinate of the plan and a micro-batch in 0..{self.plan.micro_batches - 1}"
            )
        return c, m

    def _owned(self, worker: WorkerId, coordinate: Coordinate) -> _State:
        if self.owners[coordinate] != worker:
            raise _BrokenError(f"{coordinate} belongs to worker {self.owners[coordinate]}")
        return self.own[coordinate]

    def _shadow(self, worker: WorkerId, coordinate: Coordinate) -> _State:
        if self.shadows.get(coordinate) != worker or not self.redundant_ops:
            raise _BrokenError(f"the plan runs no shadow of {coordinate} on worker {worker}")
        return self.red[coordinate]


def _out_of_order(what: str, expected: int) -> _BrokenError:
    return _BrokenError(f"{what} go in micro-batch order, each once: next is {expected}")


def unfinished(
    plan: Plan,
    worker: WorkerId,
    *,
    own: Mapping[Coordinate, CoordinateProgress | _State],
    red: Mapping[Coordinate, CoordinateProgress | _State],
) -> str | None:
    """What ``worker`` has not done of what the plan owes, in words; None when all is done."""
    trains, redundant = plan.mode.trains, plan.mode.redundant_ops
    for c in plan.placement.hosted_by(worker):
        if c in own:
            for done, word in ((own[c].forwards, "FNC"), (own[c].backwards if trains else None, "BNC")):
                if done is not None and done < plan.micro_batches:
                    return f"{word} {c} {done} is missing"
    for c in plan.placement.shadowed_by(worker):
        for op, done in ((Op.FRC, red[c].forwards), (Op.BRC, red[c].backwards)) if c in red else ():
            if op in redundant and done < plan.micro_batches:
                return f"{op.value} {c} {done} is missing"
    return None


def schedule_error(
    rule: str,
    plan: Plan,
    timeline: list[Timed] | tuple[Timed, ...],
    *,
    worker: WorkerId,
    instruction: Instruction | None,
) -> ScheduleError:
    """Build the error, with the picture of the last slots of the pipelines that ``worker`` works for."""
    now = max((t.end for t in timeline if t.worker == worker), default=0)
    pipelines = {c.pipeline for c in (*plan.placement.hosted_by(worker), *plan.placement.shadowed_by(worker))}
    guilty = None if instruction is None else Timed(worker, instruction, now, now + 1)
    picture = text_grid(
        timeline, placement=plan.placement, pipelines=pipelines, guilty=guilty, first_slot=max(0, now - 20)
    )
    return ScheduleError(rule, worker=worker, instruction=instruction, picture=picture)
