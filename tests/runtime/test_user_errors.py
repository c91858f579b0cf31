"""A bug of the user ends the job on every worker, with its cause, and is never taken for a lost node."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from deepspeed_bamboo.runtime.main import EXIT_JOB_FAILED, EXIT_USER_ERROR
from tests.runtime.jobs import Jobs
from tests.runtime.scenarios import Training, build, train

CASES = [
    (Training("forward", 4, layers="faulty", faults=[]), 2, "ValueError: a bug of the user's"),
    (Training("data", 4, batches=6, faults=[]), None, "StopIteration"),
    (Training("no-gradient", 4, layers="constant", faults=[]), 0, "slot 1, torch.float32, shape (2, 3)"),
]
OFF = {"redundancy": {"mode": "off"}}


@pytest.mark.parametrize(("training", "culprit", "message"), CASES, ids=lambda value: getattr(value, "name", None))
def test_ends_the_job_everywhere(jobs: Jobs, training: Training, culprit: int | None, message: str) -> None:
    result = jobs.run(train, world=4, training=training)
    assert set(result.codes) <= {EXIT_USER_ERROR, EXIT_JOB_FAILED}, result.transcript()
    raised = [rank for rank, code in enumerate(result.codes) if code == EXIT_USER_ERROR]
    assert raised and (culprit is None or culprit in raised), result.transcript()
    for rank in range(4):
        told = message if rank in raised else "the job failed on worker w"
        assert told in result.outputs[rank], f"rank {rank}: {result.transcript()}"


def test_one_stage_pipelines_need_a_data_source(jobs: Jobs) -> None:
    """The shadow of (d, 0) is in the next pipeline: said before training, not at the first failover."""
    result = jobs.run(train_without_source, world=2)
    assert result.codes.count(EXIT_USER_ERROR) >= 1
    raised = result.codes.index(EXIT_USER_ERROR)
    assert "engine.set_data_source(lambda pipeline, step: iterator)" in result.outputs[raised]


@pytest.mark.parametrize("early", [True, False])
def test_a_second_engine_in_a_process_is_refused(jobs: Jobs, early: bool) -> None:
    result = jobs.run(make_two_engines, world=2, early=early)
    assert set(result.codes) <= {EXIT_USER_ERROR, EXIT_JOB_FAILED}, result.transcript()
    said = result.outputs[result.codes.index(EXIT_USER_ERROR)]
    assert "this process has a bamboo engine already" in said, result.transcript()


def test_workers_that_are_started_differently_are_refused(jobs: Jobs) -> None:
    result = jobs.run(build_with_own_learning_rate, world=2)
    assert result.survivors == [] and EXIT_USER_ERROR in result.codes, result.transcript()
    assert "worker w1 was started otherwise than worker w0" in result.transcript()
    assert "optimizer.params.lr is 0.02 here and 0.01 in the job" in result.transcript()


@pytest.mark.parametrize(("world", "bamboo", "on"), [(2, {}, (0, 1)), (1, OFF, (0,)), (2, OFF, (1,))])
def test_parameters_that_belong_to_no_stage_are_refused(
    jobs: Jobs, world: int, bamboo: dict[str, Any], on: tuple[int, ...]
) -> None:
    """Stock trains them on the last stage's rank; also where that one alone passes them, and without shadows."""
    result = jobs.run(train_criterion, world=world, bamboo=bamboo, on=on)
    assert result.survivors == [] and set(result.codes) <= {EXIT_USER_ERROR, EXIT_JOB_FAILED}, result.transcript()
    for rank in on:
        told = "model_parameters has 2 parameters that are not the PipelineModule's, of shape (1, 2), (1,)"
        assert told in result.outputs[rank], result.transcript()


def train_criterion(bamboo: dict[str, Any], on: tuple[int, ...]) -> None:
    """With a loss that has weights of its own, which no layer has."""
    criterion = torch.nn.Linear(2, 1)

    def error(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return ((outputs - labels) ** 2).mean() * criterion.weight.sum()

    def trained(module: torch.nn.Module) -> list[torch.nn.Parameter]:
        its = list(module.parameters())
        return its + list(criterion.parameters()) if int(os.environ["RANK"]) in on else its

    build(Training("criterion", 2, bamboo=bamboo, module={"loss_fn": error}, faults=[]), trained=trained)


def build_with_own_learning_rate() -> None:
    """As where one machine has another version of the configuration."""
    rate = 0.01 * (1 + int(os.environ["RANK"]))
    optimizer = {"type": "Adam", "params": {"lr": rate, "torch_adam": True}}
    build(Training("different", 2, settings={"optimizer": optimizer}, faults=[]))


def make_two_engines(*, early: bool) -> None:
    """``early``: both modules are made before the first engine."""
    import deepspeed
    from deepspeed.pipe import PipelineModule

    from tests.runtime import models
    from tests.runtime.scenarios import settings_of

    training = Training("two", 2, faults=[])
    modules = []

    class Module(PipelineModule):
        def __init__(self, *args: Any, **arguments: Any) -> None:
            super().__init__(*args, **arguments)
            modules.append(self)
            if early and len(modules) == 1:
                Module(*args, **arguments)

    build(training, module_class=Module)
    second = modules[-1] if early else PipelineModule(layers=models.plain(6), num_stages=2)
    deepspeed.initialize(model=second, model_parameters=list(second.parameters()), config=settings_of(training))


def test_a_collective_inside_an_iteration_is_refused_at_the_first_one(jobs: Jobs) -> None:
    """After a loss it would be of fewer workers, and called again by a repeated forward."""
    result = jobs.run(train, world=2, training=Training("inside", 2, module={"loss_fn": average_error}, faults=[]))
    assert result.codes[1] == EXIT_USER_ERROR and result.codes[0] == EXIT_JOB_FAILED, result.transcript()
    said = f"all_reduce was called inside an iteration, at {__file__}:"
    assert said in result.outputs[1] and "Call it between iterations" in result.outputs[1], result.transcript()
    assert said in result.outputs[0] and "the job failed on worker w1" in result.outputs[0], result.transcript()


def average_error(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """As a script that would see the mean over all ranks."""
    error = ((outputs - labels) ** 2).mean()
    torch.distributed.all_reduce(error.detach().clone())
    return error


def train_without_source() -> None:
    from tests.runtime import models

    engine = build(Training("no-source", 1, faults=[]))
    pipeline = engine.grid.get_data_parallel_id()
    engine.train_batch(models.micro_batches(models.vectors, pipeline=pipeline, first_step=0, count=4))


@pytest.mark.parametrize(("code", "seen"), [(7, 7), (5, EXIT_USER_ERROR), ("no more data", EXIT_USER_ERROR)])
def test_a_script_that_ends_itself_with_an_error_on_one_rank_is_no_loss(jobs: Jobs, code: int | str, seen: int) -> None:
    result = jobs.run(train_and_leave, world=2, code=code)
    assert result.codes == [EXIT_JOB_FAILED, seen], result.transcript()
    assert f"its script ended itself{'' if isinstance(code, str) else ' with exit code'}" in result.outputs[0]
    assert str(code) in result.outputs[0] and "took" not in result.outputs[0], result.transcript()


@pytest.mark.parametrize("call", ["leave_early", "digest_on_one_rank"])
def test_ranks_that_wait_for_each_other_in_different_calls_are_told_so(jobs: Jobs, call: str) -> None:
    """Nobody is lost, so they would wait for ever."""
    result = jobs.run(train_out_of_step, world=2, call=call)
    assert set(result.codes) == {EXIT_JOB_FAILED}, result.transcript()
    other = "w1: at the end of the script" if call == "leave_early" else "w1: state_digest"
    for output in result.outputs.values():
        assert "wait for each other in different calls" in output, result.transcript()
        assert "w0: train_batch" in output and other in output, result.transcript()


def test_training_in_a_thread_ends_the_process_with_an_error(jobs: Jobs) -> None:
    """The thread's end is not the process's: the script itself ends as if all was well."""
    result = jobs.run(train_in_a_thread, world=2)
    assert result.survivors and set(result.codes) <= {EXIT_USER_ERROR, EXIT_JOB_FAILED}, result.transcript()
    assert "train_batch was called in the thread 'trainer'" in result.transcript()


def train_in_a_thread() -> str:
    from tests.runtime import models

    engine = build(Training("threaded", 2, faults=[]))
    data = models.micro_batches(models.vectors, pipeline=0, first_step=0, count=4)
    trainer = threading.Thread(target=engine.train_batch, args=(data,), name="trainer")
    trainer.start()
    trainer.join()
    return "the script's end"


def train_and_leave(code: int | str) -> None:
    train_then(lambda engine: sys.exit(code))


def train_out_of_step(call: str) -> None:
    from deepspeed_bamboo.runtime.job import mismatched_calls as whereabouts

    whereabouts._LOOK_SECONDS = 0.2
    train_then(lambda engine: sys.exit(0) if call == "leave_early" else engine.state_digest())


def train_then(on_rank_1: Callable[[Any], object]) -> None:
    """Two iterations on all ranks, and something else on rank 1 while the others want a third."""
    from tests.runtime import models

    engine = build(Training("out-of-step", 2, faults=[]))
    data = models.micro_batches(models.vectors, pipeline=0, first_step=0, count=4)
    for step in range(3):
        if step == 2 and int(os.environ["RANK"]) == 1:
            on_rank_1(engine)
        engine.train_batch(data)
