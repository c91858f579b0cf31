"""What scripts call of torch.distributed between iterations: groups of their own, objects, messages; across losses."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections import deque
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as td

from deepspeed_bamboo.coordination import EpochRecord, Member
from deepspeed_bamboo.core.grid import Grid
from deepspeed_bamboo.core.placement import Placement
from deepspeed_bamboo.errors import BambooError, ConfigError, MessageError
from deepspeed_bamboo.runtime.comm import board, frames
from deepspeed_bamboo.runtime.comm.board import pack, unpack
from deepspeed_bamboo.runtime.comm.encoding import encode
from deepspeed_bamboo.runtime.comm.epoch_monitor import Interruption
from deepspeed_bamboo.runtime.comm.peers import Links
from deepspeed_bamboo.runtime.comm.store_server import StoreServer
from deepspeed_bamboo.runtime.iteration.activity import ActivityState
from deepspeed_bamboo.runtime.iteration.worker import Worker
from deepspeed_bamboo.runtime.recovery.script_server import ScriptServer
from deepspeed_bamboo.runtime.stock.served_group import Part, ServedGroup
from tests.runtime import models
from tests.runtime.jobs import Jobs
from tests.runtime.scenarios import Training, build, fresh_process_group
from tests.runtime.test_losses import kill


def make_groups() -> dict[str, Any]:
    """Everybody makes every group, as torch wants it."""
    rank, world = td.get_rank(), td.get_world_size()
    alone = [td.new_group([r]) for r in range(world)][rank]
    halves = [td.new_group([0, 1]), td.new_group([2, 3])][rank // 2]
    return {"alone": alone, "half": halves, "ends": td.new_group([0, 3]), "all": td.new_group()}


def talk(engine: Any, groups: dict[str, Any], step: int, *, sender: int, dies: int | None) -> dict[str, Any]:
    """One round of everything. ``sender`` sends to the rank behind it; ``dies`` is killed in the middle."""
    said: dict[str, Any] = {"world": td.get_world_size()}
    total = torch.ones(1)
    td.all_reduce(total)
    said["total"] = total.item()
    ends = torch.tensor([float(engine.is_first_stage()), float(engine.is_last_stage())])
    td.all_reduce(ends)
    said["ends"] = ends.tolist()
    whole: list[Any] = [None] * td.get_world_size()
    td.all_gather_object(whole, {"step": step, "long": "x" * (step + 1)})
    said["objects"] = whole
    told = [f"from the last, in step {step}"] if td.get_rank() == 3 else [None]
    td.broadcast_object_list(told, src=3)
    said["told"] = told
    if td.get_rank() == sender:
        td.send(torch.tensor([step, step + 1]), dst=sender + 1)
    if td.get_rank() == sender + 1:
        received = torch.zeros(2, dtype=torch.int64)
        td.recv(received, src=sender)
        assert received.tolist() == [step, step + 1]
    if td.get_rank() == dies:
        os.kill(os.getpid(), signal.SIGKILL)
    for name in ("alone", "half", "all"):
        part = torch.full((2,), 2.0)
        td.all_reduce(part, op=td.ReduceOp.MAX, group=groups[name])
        said[name] = part.tolist()
        assert td.get_rank(groups[name]) >= 0
    # As Megatron calculates the first rank of its group of one: from the lowest that this worker stands for.
    part = torch.full((2,), float(step))
    td.broadcast(part, src=td.get_rank() // 1, group=groups["alone"])
    assert part.tolist() == [step, step]
    part = torch.full((2,), float(step))
    td.all_reduce(part, op=td.ReduceOp.MAX, group=engine.grid.get_pipe_parallel_group())
    said["pipe"] = part.tolist()
    part = torch.tensor([float(engine.is_last_stage())])
    td.broadcast(part, src=engine.grid.stage_to_global(3), group=engine.grid.get_pipe_parallel_group())
    assert part.item() == 1.0
    td.all_reduce(part, group=engine.grid.get_data_parallel_group())
    assert part.item() == 1.0, "one pipeline"
    td.monitored_barrier()
    td.monitored_barrier(group=engine.grid.get_model_parallel_group())
    if groups["ends"] != td.GroupMember.NON_GROUP_MEMBER:
        part = torch.tensor([7.0 if td.get_rank(groups["ends"]) == 0 else 0.0])
        td.broadcast(part, src=0, group=groups["ends"])
        assert part.item() == 7.0
    return said


def train_and_talk(training: Training, before: bool, sender: int = 0, dies: int | None = None) -> dict[str, Any]:
    fresh_process_group(training.name)
    early = make_groups() if before else None
    engine = build(training, fresh=False)
    groups = early or make_groups()
    data = models.micro_batches(models.vectors, pipeline=0, first_step=0, count=training.micro_batches)
    losses, said = [], []
    while engine.global_steps < training.steps:
        step = engine.global_steps
        losses.append(float(engine.train_batch(data)))
        said.append(talk(engine, groups, step, sender=sender, dies=dies if step == 1 else None))
    result = {"losses": losses, "said": said}
    if training.faults is not None:
        result["digest"] = engine.state_digest()
        engine.close()
    return result


@pytest.mark.parametrize(("before", "stage"), [(True, 0), (False, 2)])
def test_groups_objects_and_broadcasts_go_on_after_a_loss(jobs: Jobs, before: bool, stage: int) -> None:
    more: dict[str, Any] = {"before": before, "sender": 1 if stage == 0 else 0}
    plain = jobs.run(train_and_talk, world=4, training=Training(f"plain{stage}", 4, faults=None), **more)
    killed = Training(f"killed{stage}", 4, faults=[kill(1, 0, stage, "backward", 1)])
    result = jobs.run(train_and_talk, world=4, training=killed, **more)
    assert result.survivors == [rank for rank in range(4) if rank != stage], result.transcript()
    assert result.common("losses") == plain.common("losses")
    said = result.common("said")
    assert [round["world"] for round in said] == [4, 3, 3], "as many as are left"
    assert [one_of_four(round) for round in said] == plain.common("said")


def test_a_worker_lost_in_a_groups_collective_is_stood_for(jobs: Jobs) -> None:
    """The one that waits for it recovers there, while others are in the next iteration already."""
    plain = jobs.run(train_and_talk, world=4, training=Training("plain-in", 4, faults=None), before=False, sender=2)
    result = jobs.run(
        train_and_talk, world=4, training=Training("killed-in", 4, faults=[]), before=False, sender=2, dies=1
    )
    assert result.survivors == [0, 2, 3], result.transcript()
    assert result.common("losses") == plain.common("losses")
    said = result.common("said")
    assert [round["world"] for round in said] == [4, 4, 3]
    assert [one_of_four(round) for round in said] == plain.common("said")


def train_and_send(training: Training) -> dict[str, Any]:
    """The first stage sends what goes with each step to the last, as scripts do with targets."""
    fresh_process_group(training.name)
    engine = build(training, fresh=False)
    data = models.micro_batches(models.vectors, pipeline=0, first_step=0, count=training.micro_batches)
    losses, taken = [], []
    while engine.global_steps < training.steps:
        step = torch.tensor([engine.global_steps])
        if engine.is_first_stage():
            for _ in range(2):
                td.send(step, dst=1)  # after a loss nobody takes it
        else:
            for _ in range(2):
                td.recv(step, src=0)
        losses.append(float(engine.train_batch(data)))
    if training.faults and td.get_world_size() == 1:
        td.send(torch.tensor([7]), dst=1)
        td.recv(found := torch.zeros(1, dtype=torch.int64), src=0)
        taken.append(found.item())
        with pytest.raises(BambooError, match="this worker now stands for that rank, too"):
            td.recv(found, src=0)
    stages = [stage for stage in range(2) if engine.grid.get_pipe_parallel_rank() == stage]
    if training.faults is not None:
        engine.close()
    return {"losses": losses, "taken": taken, "stages": stages}


@pytest.mark.parametrize("stage", [0, 1])
def test_a_worker_that_stands_for_both_ends_may_send_to_itself(jobs: Jobs, stage: int) -> None:
    plain = jobs.run(train_and_send, world=2, training=Training(f"both{stage}", 2, faults=None))
    killed = Training(f"both-killed{stage}", 2, faults=[kill(1, 0, stage, "backward", 1)])
    result = jobs.run(train_and_send, world=2, training=killed)
    assert result.survivors == [1 - stage], result.transcript()
    assert result.common("losses") == plain.common("losses")
    assert result.common("taken") == [7]
    assert result.common("stages") == [0, 1], "so `if grid.get_pipe_parallel_rank() == 0: save()` is done by somebody"


def train_and_send_ahead(training: Training) -> dict[str, Any]:
    """As diffusion-pipe does: whoever begins to read sends, or receives, what goes with the next step, too."""
    fresh_process_group(training.name)
    engine = build(training, fresh=False)
    data, losses, reads = models.micro_batches(models.vectors, pipeline=0, first_step=0, count=4), [], False
    while engine.global_steps < training.steps:
        step = torch.zeros(1)
        for _ in range(1 if reads else 2):
            if engine.is_first_stage():
                td.send(step, dst=engine.grid.stage_to_global(2))
            elif engine.is_last_stage():
                td.recv(step, src=0)
        reads = engine.is_first_stage() or engine.is_last_stage()
        losses.append(float(engine.train_batch(data if reads else None)))
    if training.faults is not None:
        engine.close()
    return {"losses": losses}


@pytest.mark.sweep
def test_whoever_waits_for_a_message_that_nobody_sends_ends_the_job(jobs: Jobs) -> None:
    """It would wait for ever, and the others for it; and which loss this would be is said when the job begins."""
    plain = jobs.run(train_and_send_ahead, world=3, training=Training("ahead", 3))
    for stage in (0, 1):
        others = Training(f"ahead-{stage}", 3, faults=[kill(1, 0, stage, "backward", 1)])
        result = jobs.run(train_and_send_ahead, world=3, training=others)
        assert result.survivors == [rank for rank in range(3) if rank != stage], result.transcript()
        assert result.common("losses") == plain.common("losses")
    said = (
        "the script of w2 reads data, and ranks send each other messages meanwhile; that of w1, which holds the shadow"
    )
    assert said in result.outputs[0], result.transcript()
    last = Training("ahead-last", 3, faults=[kill(1, 0, 2, "backward", 1)])
    result = jobs.run(train_and_send_ahead, world=3, training=last)
    assert result.survivors == [], result.transcript()
    told = result.transcript()
    assert "w1 waits for a message from w0" in told and "w0 waits for w1: train_batch" in told, told


def train_in_groups_of_the_grid(training: Training) -> dict[str, Any]:
    fresh_process_group(training.name)
    engine = build(training, fresh=False)
    data = models.micro_batches(models.vectors, pipeline=td.get_rank() % 2, first_step=0, count=training.micro_batches)
    losses, said = [], []
    while engine.global_steps < training.steps:
        losses.append(float(engine.train_batch(data)))
        told = torch.tensor([losses[-1] if engine.is_last_stage() else 0.0])
        td.broadcast(told, src=engine.grid.stage_to_global(1), group=engine.grid.get_pipe_parallel_group())
        assert told.item() == pytest.approx(losses[-1])
        td.all_reduce(count := torch.ones(1), group=engine.grid.get_data_parallel_group())
        said.append([count.item(), td.get_world_size(engine.grid.get_model_parallel_group())])
    if training.faults is not None:
        engine.close()
    return {"losses": losses, "said": said}


@pytest.mark.sweep
def test_groups_of_the_grid_go_on_after_a_loss(jobs: Jobs) -> None:
    """Of two pipelines: in a group that the new owner did not begin in, the lost rank is missing from then on."""
    plain = jobs.run(train_in_groups_of_the_grid, world=4, training=Training("plain-grid", 2, faults=None))
    killed = Training("killed-grid", 2, faults=[kill(1, 0, 1, "backward", 1)])
    result = jobs.run(train_in_groups_of_the_grid, world=4, training=killed)
    assert result.survivors == [0, 1, 3], result.transcript()
    assert result.common("losses") == plain.common("losses")
    whole = [[2.0, 2]]
    assert plain.common("said") == whole * 3
    assert [result.values[rank]["said"][0] for rank in (0, 1, 3)] == whole * 3
    assert [result.values[rank]["said"][2] for rank in (0, 1, 3)] == [[2.0, 1], [2.0, 2], [1.0, 2]]


def one_of_four(said: dict[str, Any]) -> dict[str, Any]:
    """What would have been said if nobody was lost: a mean stays, and everybody's objects are alike."""
    assert said["total"] == said["world"] == len(said["objects"])
    assert said["ends"] == [1.0, 1.0], "one worker hosts the first stage, and one the last"
    return {**said, "world": 4, "total": 4.0, "objects": said["objects"][:1] * 4}


@pytest.mark.parametrize(("kind", "inside"), [("train", "an iteration"), ("data", "an iteration"), ("save", "'save'")])
def test_calls_inside_an_activity_are_refused_but_for_groups_of_one(kind: str, inside: str) -> None:
    """Each would be made by whoever hosts the stage; in a group of one rank nobody else takes part."""
    server = ScriptServer.__new__(ScriptServer)
    worker = Worker(**dict.fromkeys(field.name for field in dataclasses.fields(Worker)))  # type: ignore[arg-type]
    worker = dataclasses.replace(worker, activity=ActivityState(kind=kind), grid=Grid(1, 2))
    server._worker = worker
    value = torch.ones(2)
    for call in (
        lambda: server.gather_world(value),
        lambda: server.gather("group", [0, 1], None, value),
        lambda: server.leave_for("group", 1, value, 0),
        lambda: server.take_from("group", 1, 0),
        lambda: worker.agree_on("barrier", lambda: None),
    ):
        with pytest.raises(ConfigError, match=f"was called inside {inside}, at {__file__}:"):
            call()
    (part,) = server.gather("group", [1], None, value)
    assert part.ranks == (1,) and torch.equal(part.tensor, value) and part.tensor is not value
    server._worker = dataclasses.replace(worker, grid=Grid(1, 1))
    (part,) = server.gather_world(value)
    assert part.ranks == (0,) and torch.equal(part.tensor, value)


class Gathering(ServedGroup):
    """Rank ``own`` of a group that had the workers ``before``, each with these ranks, and has ``parts`` now."""

    def __init__(self, own: int, all_ranks: int, parts: list[Part], *, before: Sequence[Sequence[int]] = ()) -> None:
        super().__init__(own, all_ranks)
        self.all_ranks = all_ranks
        self._parts, self._before = parts, before

    def gather_all(self, tensor: torch.Tensor) -> list[Part]:
        return self._parts

    def former(self, count: int) -> Sequence[int]:
        return next((ranks for ranks in self._before if len(ranks) == count), ())


def part(*ranks: int, value: float) -> Part:
    return Part(ranks, torch.tensor([value]))


def test_a_list_for_as_many_as_there_were_before_a_loss_is_filled_by_those() -> None:
    """The worker with ranks 0 and 1 has taken 2 over when the script had asked for the size already: three."""
    parts = [part(0, 1, 2, value=5.0), part(3, value=7.0)]
    group = Gathering(3, 4, parts, before=[(0, 2, 3)])
    for count, expected in ((2, [5.0, 7.0]), (3, [5.0, 5.0, 7.0]), (4, [5.0, 5.0, 5.0, 7.0])):
        outputs = [torch.zeros(1) for _ in range(count)]
        group.allgather([outputs], [torch.zeros(1)])
        assert [float(output) for output in outputs] == expected
        joined = torch.zeros(count)
        group._allgather_base(joined, torch.zeros(1))
        assert joined.tolist() == expected
    with pytest.raises(ValueError, match="all_gather with 5 tensors, but there are 2 workers"):
        group.allgather([[torch.zeros(1) for _ in range(5)]], [torch.zeros(1)])


def test_one_that_stood_by_and_was_lost_leaves_a_place() -> None:
    group = Gathering(0, 2, [part(0, value=5.0), part(1, value=7.0)], before=[(0, 1, 2)])
    outputs = [torch.zeros(1) for _ in range(3)]
    group.allgather([outputs], [torch.zeros(1)])
    assert [float(output) for output in outputs] == [5.0, 7.0, 5.0]


def test_rows_for_as_many_as_there_were_before_a_loss_go_to_those() -> None:
    """One worker had asked for the size before it knew of the loss, the other after that."""
    early, late = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[10.0], [30.0]])
    parts = [Part((0, 1, 2), early), Part((3,), late)]
    group = Gathering(3, 4, parts, before=[(0, 2, 3)])
    group.reduce_scatter([output := torch.zeros(1)], [list(early)])
    assert output.item() == 33.0
    outputs = [torch.zeros(1), torch.zeros(1)]
    group.alltoall(outputs, list(late))
    assert [float(one) for one in outputs] == [3.0, 30.0]


def test_the_server_knows_who_was_in_the_world_and_in_a_group() -> None:
    grid, workers = Grid(1, 4), ["a", "b", "c", "d"]
    server = ScriptServer.__new__(ScriptServer)
    server._first_homes = {worker: rank for rank, worker in enumerate(workers)}
    whole = Placement.initial(grid, workers)
    first_loss, _ = whole.without(["b"])
    assert first_loss is not None
    second_loss, _ = first_loss.protected(["a", "c", "d"]).without(["c"])
    assert second_loss is not None
    server._records = deque(
        EpochRecord(number, tuple(w for w in workers if w in placement.workers), placement, "", (), "a", 0.0)
        for number, placement in enumerate((whole, first_loss, second_loss))
    )
    assert [list(server.former(count)) for count in (4, 3, 5)] == [[0, 1, 2, 3], [0, 2, 3], []]
    assert [list(server.former(count, ranks=[0, 2, 3])) for count in (3, 2)] == [[0, 2, 3], [0, 3]]


def test_what_is_laid_out_comes_back_as_it_was() -> None:
    tensors = [torch.tensor([1.5, -0.0], dtype=torch.bfloat16), torch.arange(3), torch.empty(0, 4), torch.tensor(True)]
    for value, found in zip(tensors, unpack(pack(tensors)), strict=True):
        assert found.dtype == value.dtype and found.shape == value.shape and torch.equal(found, value)
    for damaged in (pack(tensors) + b"more", pack(tensors)[:-1], b"", encode({"no": "list"}), encode([1])):
        with pytest.raises(MessageError):
            unpack(damaged)


def test_what_is_larger_than_a_message_to_a_store_is_laid_out_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board, "PIECE_BYTES", 100)
    monkeypatch.setattr(frames, "_LIMIT_BYTES", 400)
    names = ("w0", "w1")
    stores = {name: StoreServer("127.0.0.1", secret="s") for name in names}
    members = {n: Member(n, n, "z", "127.0.0.1", stores[n].port, os.getpid(), 0) for n in names}
    boards = {}
    for name in names:
        waits = Interruption()
        links = Links(name, interruption=waits, timeout_seconds=20, device=torch.device("cpu"), secret="s")
        links.enter(members=members, order=names, name="epoch")
        boards[name] = board.Board(stores[name], links=links, me=name, interruption=waits)
    large = torch.arange(1000)
    for remove in (False, True):
        boards["w0"].lay_out("large", [large, torch.ones(2)])
        for name in names:
            (found, _) = boards[name].fetch({"w0": "large"}, remove=remove and name == "w1")["w0"]
            assert torch.equal(found, large)
        boards["w0"].take_in([] if remove else ["large"])
        assert stores["w0"]._count() == 0
        assert boards["w1"].look({"w0": "large"}) == {}
    for store in stores.values():
        store.close()
