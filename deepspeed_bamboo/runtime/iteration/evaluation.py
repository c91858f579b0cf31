"""``eval_batch``: forwards only, repeated from the start when a loss interrupts them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from deepspeed_bamboo.core.grid import Coordinate
from deepspeed_bamboo.runtime.iteration.evaluation_position import EvaluationPositions
from deepspeed_bamboo.runtime.iteration.executor import Executor
from deepspeed_bamboo.runtime.iteration.feeding import EvaluationData, Feed
from deepspeed_bamboo.runtime.iteration.losses import mean_over_pipelines, to_host
from deepspeed_bamboo.runtime.iteration.programs import Programs
from deepspeed_bamboo.runtime.iteration.recompute import BufferState, restore_state, state_before
from deepspeed_bamboo.runtime.iteration.step_history import StepHistory
from deepspeed_bamboo.runtime.iteration.supply import DataSupply
from deepspeed_bamboo.runtime.iteration.worker import Worker
from deepspeed_bamboo.runtime.stock.buffers import BufferName, Marks, marks_of, moved_since
from deepspeed_bamboo.runtime.stock.noted_values import NotedValues
from deepspeed_bamboo.runtime.stock.replica import StageReplica

_BUFFERS = "buffers"


class EvaluatedEngine(Protocol):
    """What an evaluation uses of an engine, most of it stock's."""

    worker: Worker
    feed: Feed
    programs: Programs
    executor: Executor
    monitor: Any
    evaluated: EvaluationPositions
    evaluated_micro_batches: int
    is_data_parallel: bool
    batch_fn: Any
    global_samples: int
    history: StepHistory
    owner_changes: Any  # the engine's OwnerChanges
    eval_return_logits: bool
    _compute_loss: bool
    fwd_outputs: list[Any]
    outputs: Any

    def _reduce_outputs(self, outputs: Any, *, reduce: str | None, reduce_dp: bool, micro_batches: int) -> Any: ...


@dataclass(frozen=True)
class _Before:
    """A stage before the evaluation."""

    replica: StageReplica  # so that no other one gets its id
    state: BufferState
    marks: Marks


@dataclass(frozen=True)
class EvaluationRequest:
    """The arguments of ``eval_batch``, see there."""

    micro_batches: int
    return_logits: bool
    compute_loss: bool
    reduce_output: str | None
    broadcast: bool


def data_as_others(engine: EvaluatedEngine, iterator: Iterator[Any] | None) -> EvaluationData:
    """Before an evaluation of ``iterator``: learn who has data for it, and give late workers the others' position.

    A late worker's ``iterator`` continues where the others' are, which have served evaluations before. Otherwise inputs
    and labels of different samples would meet, if it hosts one end of a pipeline and not the other. So does the source
    for evaluations, where an iterator serves several of one step. Collective.
    """
    data = engine.feed.for_evaluation(iterator)
    if iterator is not None and iterator is engine.feed.data.iterator:
        data.distrusted = engine.feed.data.distrusted
    step, own = engine.worker.step, engine.evaluated.of(iterator)
    in_step = engine.evaluated.in_step(iterator, step)
    given: dict[str, Any] = {"data": lambda: data, "transform": lambda: engine.batch_fn}
    supply = DataSupply(engine.worker, **given)
    told = engine.worker.agree_on("evaluation position", lambda: (own, in_step, data.own, supply.own()))
    behind = max(position for position, *_ in told.values()) - own
    engine.evaluated.skip(iterator, behind, transform=engine.batch_fn)
    passed = max(taken for _, taken, *_ in told.values())
    engine.evaluated.agree(iterator, step, taken=passed)
    engine.feed.begin_evaluation(passed=passed)
    table = {worker: has for worker, (*_, has) in told.items()}
    given["iterators"] = {worker: its for worker, (_, _, its, _) in told.items()}
    given |= {"evaluation": engine.feed.said_of_evaluations, "had": engine.feed.had_for_evaluations}
    supply = DataSupply(engine.worker, **given, table=table)
    if engine.worker.protects:
        supply.say_who_is_the_last()
    return EvaluationData(data, supply)


def evaluate(engine: EvaluatedEngine, request: EvaluationRequest) -> Any:
    """Evaluate one batch; collective. Returns what stock's ``eval_batch`` returns for these arguments.

    The result goes to everybody only if it is asked for (``broadcast``) or pipelines are averaged; else
    the hosts of a last stage have theirs, and the others get None.
    """
    kept: dict[Coordinate, Any] = {}
    shared = request.compute_loss and (request.broadcast or engine.monitor.wanted)
    shared = shared or (request.reduce_output is not None and engine.is_data_parallel)

    before: dict[int, _Before] = {}

    def outputs_here() -> dict[str, Any]:
        kept.clear()
        if engine.worker.protects:
            engine.owner_changes.begin_evaluation()
            _start_again(engine.worker.host.owners(), before)
        _run_forwards(engine, request)
        for replica in _last_stages(engine):
            engine.worker.host.activate(replica)
            outputs = engine.fwd_outputs
            kept[replica.coordinate] = engine._reduce_outputs(
                outputs, reduce=request.reduce_output, reduce_dp=False, micro_batches=request.micro_batches
            )
        shown = {"outputs": {c: to_host(output) for c, output in kept.items()}} if shared else {}
        return {**shown, **_moved(engine.worker.host.owners(), before)}

    _prepare(engine, request)
    engine.evaluated_micro_batches = request.micro_batches
    agreed = engine.worker.agree_on("evaluate", outputs_here)
    moved = [NotedValues(c, {}, buffers=_named(its)) for v in agreed.values() for c, its in v.get(_BUFFERS, {}).items()]
    engine.owner_changes.evaluated(moved)
    evaluation = engine.feed.evaluation
    if engine.worker.protects and evaluation is not None:
        # Every worker's iterator advances as far, since each may have to feed a stage the next time.
        evaluation.data.complete(request.micro_batches, step=engine.worker.step, transform=engine.batch_fn)
    result = _result(engine, request, kept=kept, shared=shared)
    engine.worker.session.past.note_evaluation(engine.worker.step, _number(result))
    logits = next((replica.attributes.get("outputs") for replica in _last_stages(engine)), None)
    _clean_up(engine, request)
    if engine.monitor.wanted:
        engine.monitor.note([("Train/Samples/eval_loss", result.mean().item(), engine.global_samples)])
    return (result, logits) if request.return_logits else result


def _prepare(engine: EvaluatedEngine, request: EvaluationRequest) -> None:
    engine.eval_return_logits = request.return_logits
    engine._compute_loss = request.compute_loss


def _start_again(owners: Iterable[StageReplica], before: dict[int, _Before]) -> None:
    """A forward may change buffers and more, and counts once though a loss has it repeated."""
    for replica in owners:
        if id(replica) in before:
            restore_state(before[id(replica)].state, replica)
        else:
            state = state_before(replica, previous=None)
            before[id(replica)] = _Before(replica, state, marks_of(replica.module))


def _moved(owners: Iterable[StageReplica], before: Mapping[int, _Before]) -> dict[str, Any]:
    """The buffers that the evaluation has moved here: shadows need them, and so does a later way back."""
    found: dict[str, list[Any]] = {}
    for replica in owners:
        if id(replica) in before:
            moved = moved_since(replica.module, before[id(replica)].marks)
            if moved:
                found[str(replica.coordinate)] = [[*name, to_host(buffer)] for name, buffer in moved.items()]
    return {_BUFFERS: found} if found else {}


def _named(buffers: Iterable[Any]) -> dict[BufferName, torch.Tensor]:
    return {(name, kept): buffer for name, kept, buffer in buffers}


def _run_forwards(engine: EvaluatedEngine, request: EvaluationRequest) -> None:
    for replica in engine.worker.host.owners():
        engine.worker.host.restart(replica, micro_batches=request.micro_batches, training=False)
    context = engine.programs.context(training=False, micro_batches=request.micro_batches)
    if engine.feed.evaluation is not None:
        engine.feed.evaluation.supply.deliver(micro_batches=request.micro_batches, beforehand=False)
    with torch.no_grad():
        for instruction in engine.programs.own(training=False):
            engine.executor.execute(instruction, context)
    engine.worker.host.save()


def _last_stages(engine: EvaluatedEngine) -> list[StageReplica]:
    return [
        replica for replica in engine.worker.host.owners() if replica.coordinate.stage == engine.worker.grid.stages - 1
    ]


def _result(engine: EvaluatedEngine, request: EvaluationRequest, *, kept: dict[Coordinate, Any], shared: bool) -> Any:
    own = next(iter(kept.values()), None)
    if shared:
        agreed: dict[Coordinate, Any] = {}
        for value in engine.worker.activity.previous[0].values():
            agreed.update(value.get("outputs", {}))
        contributed = [
            agreed[Coordinate(d, engine.worker.grid.stages - 1)] for d in range(engine.worker.grid.pipelines)
        ]
        everywhere = request.compute_loss and (request.broadcast or engine.monitor.wanted)
        if request.reduce_output is not None and (everywhere or own is not None):
            own = _to_device(mean_over_pipelines(contributed), engine.worker.device)
        elif everywhere and own is None:
            own = _to_device(contributed[0], engine.worker.device)
    return own


def _number(result: Any) -> float:
    """For workers that come late; nan where it is no number."""
    return float(result.item()) if isinstance(result, torch.Tensor) and result.numel() == 1 else math.nan


def _to_device(value: Any, device: torch.device) -> Any:
    return [_to_device(item, device) for item in value] if isinstance(value, list) else value.to(device)


def _clean_up(engine: EvaluatedEngine, request: EvaluationRequest) -> None:
    engine.eval_return_logits = False
    engine.worker.links.drain()
    engine.history.note(evaluated=request.micro_batches)
    for replica in engine.worker.host.replicas():
        # Where stock seeds layers it counts evaluated micro-batches like trained ones, and keeps doing so.
        replica.micro_offset += request.micro_batches
        replica.attributes["outputs"] = None
        replica.start_iteration()
        with engine.worker.host.hosting(replica):
            engine.outputs = None
            engine.fwd_outputs = []
    engine.worker.host.activate_shown()
