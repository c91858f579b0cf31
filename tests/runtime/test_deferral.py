"""Passes launched before their input was seen: nothing computed from an input that never comes may be left behind."""

from __future__ import annotations

import dataclasses
import functools
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepspeed_bamboo.coordination import JobFailure
from deepspeed_bamboo.core.grid import Coordinate, Grid
from deepspeed_bamboo.core.instructions import Instruction, Op
from deepspeed_bamboo.core.placement import Placement
from deepspeed_bamboo.core.progress import CoordinateProgress
from deepspeed_bamboo.errors import JobFailedError
from deepspeed_bamboo.pulse import SIZE_BYTES, Pulse
from deepspeed_bamboo.runtime.comm.epoch_monitor import EpochChangedError, Interruption
from deepspeed_bamboo.runtime.iteration.bubbles import Bubbles
from deepspeed_bamboo.runtime.iteration.executor import Executor
from deepspeed_bamboo.runtime.iteration.messages import IterationContext
from deepspeed_bamboo.runtime.stock.replica import StageReplica
from tests.runtime.jobs import Jobs
from tests.runtime.scenarios import Training, train_and_train_late
from tests.runtime.test_losses import BF16, CLIPPED, EAGER, FP16, SPIKES, ZERO, kill

# Neighbours of the lost stage wait for it, others for them: forwards, backwards, and both of one micro-batch.
LOSSES = [kill(1, 0, 1, "forward", 2), kill(2, 0, 2, "backward", 1), kill(3, 0, 0, "backward", 2)]
CHECKPOINTED = {"activation_checkpoint_interval": 1}
DEFAULT = [
    Training(
        "late-buffers",
        4,
        steps=5,
        layers="averaged",
        dropout=0.3,
        settings={**CLIPPED, **BF16},
        bamboo={"debug_check_shadows": 2},
    )
]
SWEEP = [
    Training("late-eager", 4, steps=5, layers="averaged", dropout=0.3, bamboo=EAGER, settings=BF16),
    Training("late-checkpointed", 4, steps=5, dropout=0.3, settings=BF16, module=CHECKPOINTED),
    Training("late-tied", 4, steps=5, layers="tied", settings={**CLIPPED, **BF16}),
    Training("late-fp32", 4, steps=5, layers="averaged", dropout=0.3, settings=CLIPPED),
    Training("late-statistics", 4, steps=5, layers="normalised", settings=CLIPPED),
    Training("late-fp16", 4, steps=5, settings={**CLIPPED, **FP16}, spikes=SPIKES),
]


@pytest.mark.parametrize(
    "training",
    [
        *(pytest.param(case, id=case.name) for case in DEFAULT),
        *(pytest.param(case, id=case.name, marks=pytest.mark.sweep) for case in SWEEP),
    ],
)
def test_nothing_computed_from_what_never_came_is_left(jobs: Jobs, training: Training) -> None:
    undisturbed = dataclasses.replace(training, name=f"{training.name}-whole", faults=[])
    killed = dataclasses.replace(training, name=f"{training.name}-killed", faults=LOSSES)
    result = jobs.run(train_and_train_late, world=4, timeout_seconds=300.0, undisturbed=undisturbed, killed=killed)
    assert result.codes.count(-9) == len(LOSSES), result.transcript()
    values = result.values[result.survivors[0]]
    for what in ("losses", "steps", "norm", "scale", "skipped", "digest"):
        assert values[killed.name][what] == values[undisturbed.name][what], what
    assert values[killed.name]["used"] > 10
    assert values[killed.name].get("late", 0) > 0 or "bf16" not in training.settings or training.bamboo is EAGER
    assert values[killed.name]["lost"] > 0, "no pass had to be taken back, so nothing was tested"


SEVERAL = [
    Training("late-bf16-2x2", 2, steps=5, layers="averaged", dropout=0.3, settings={**CLIPPED, **BF16}),
    Training("late-tied-2x2", 2, steps=5, layers="tied", settings={**CLIPPED, **BF16}),
    Training("late-eager-2x2", 2, steps=5, bamboo=EAGER, settings={**CLIPPED, **BF16}),
    Training("late-zero-2x2", 2, steps=5, settings={**CLIPPED, **ZERO, **BF16}),
    Training("late-bf16-4x1", 1, steps=5, settings={**CLIPPED, **BF16}),
]


@pytest.mark.parametrize(
    "training",
    [
        pytest.param(SEVERAL[0], id=SEVERAL[0].name),
        *(pytest.param(case, id=case.name, marks=pytest.mark.sweep) for case in SEVERAL[1:]),
    ],
)
def test_several_pipelines_as_on_a_gpu(jobs: Jobs, training: Training) -> None:
    """Where a shadow's step has a collective more, what is gathered, than can be waited for in a late one."""
    stages = training.stages
    losses = [kill(1, 1, 0, "forward", 2), kill(2, 0, stages - 1, "gather"), kill(3, 0, 0, "backward", 2)]
    undisturbed = dataclasses.replace(training, name=f"{training.name}-whole", faults=[])
    killed = dataclasses.replace(training, name=f"{training.name}-killed", faults=losses)
    result = jobs.run(train_and_train_late, world=4, timeout_seconds=300.0, undisturbed=undisturbed, killed=killed)
    assert result.codes.count(-9) >= 2, result.transcript()
    values = result.values[result.survivors[0]]
    for what in ("losses", "steps", "norm", "digest"):
        assert values[killed.name][what] == values[undisturbed.name][what], what
    assert stages == 1 or values[killed.name]["used"] > 0


class _Arrival:
    """Arrives when told to; ``asked`` is how often the host has waited for it."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.asked = 0
        self.given_up = threading.Event()

    def confirm(self, interruption: Any) -> None:
        self.asked += 1
        if self.error is not None:
            raise self.error

    def abort(self) -> None:
        self.given_up.set()


UNMEASURED = IterationContext(Placement.initial(Grid(1, 2), ["w0", "w1"]), 0, 0, training=False, micro_batches=1)


class _Worker:
    """An executor over a bare engine whose every step is noted in ``log``."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.waiting = False
        self.arrival = _Arrival()
        coordinate = Coordinate(0, 1)
        self.replica = StageReplica(
            coordinate, {"optimizer": object(), "pipe_buffers": {}, "module": torch.nn.Linear(1, 1)}, []
        )
        self.interruption = Interruption()
        updates = SimpleNamespace(flush=self._accumulate, covers=lambda _: True, drop=lambda _: self.log.append("drop"))
        host = SimpleNamespace(
            owned={coordinate: self.replica},
            shadows={},
            gradient_updates=updates,
            activate=lambda _: None,
            drop_micro_batch=lambda *_: self.log.append("free"),
        )
        engine = SimpleNamespace(
            device=torch.device("cpu"),
            session=SimpleNamespace(interruption=self.interruption),
            iteration_end=SimpleNamespace(launch_late_steps=lambda: None),
            failover=SimpleNamespace(recovering=False),
            total_loss=torch.tensor(1.0),
            total_additional_losses=None,
            fwd_outputs=[],
            pipe_buffers={name: [None] for name in ("inputs", "outputs", "labels")},
            grad_layer=None,
        )
        self.executor = Executor(
            engine,  # type: ignore[arg-type]
            host=host,  # type: ignore[arg-type]
            links=SimpleNamespace(),  # type: ignore[arg-type]
            me="w0",
            seed=lambda: 0,
            before=lambda *_: None,
            after=lambda *_: None,
            redundant=SimpleNamespace(bubbles=Bubbles(None)),  # type: ignore[arg-type]
            pulse=Pulse(bytearray(SIZE_BYTES)),
        )
        self.engine = engine
        self.deferral = self.executor._deferral
        self.executor._methods = {op: functools.partial(self._note, op) for op in self.executor._methods}
        self.executor._methods[Op.RECV_ACTIVATION] = self._receive

    def _accumulate(self) -> None:
        if self.waiting:
            self.log.append("accumulate")
        self.waiting = False

    def _note(self, op: Op, *_: Any) -> None:
        self.waiting |= op is Op.BNC
        self.log.append(f"{op.value} asked {self.arrival.asked}")

    def _receive(self, *_: Any) -> None:
        self.log.append("receive")
        self.deferral.begin(self.replica, 0, receive=Op.RECV_ACTIVATION, arrival=self.arrival)  # type: ignore[arg-type]

    def run(self, *ops: Op) -> None:
        for op in ops:
            self.executor.execute(Instruction(op, self.replica.coordinate, 0), UNMEASURED)


def test_passes_are_launched_before_their_input_was_seen_and_nothing_leaves_the_worker_before_it_was() -> None:
    worker = _Worker()
    worker.executor.attempt("train", lambda: worker.run(Op.RECV_ACTIVATION, Op.FNC, Op.BNC, Op.SEND_GRAD))
    assert worker.log == ["receive", "FNC asked 0", "BNC asked 0", "free", "SEND_GRAD asked 1", "accumulate"]


def test_input_that_never_comes_leaves_the_worker_as_it_was_before_the_receive() -> None:
    worker = _Worker()
    before = worker.replica.progress
    worker.arrival.error = EpochChangedError("a worker was lost")

    def body() -> None:
        worker.run(Op.RECV_ACTIVATION, Op.FNC)
        worker.engine.total_loss += float("nan")
        worker.replica.losses[0] = worker.replica.retained_outputs[0] = torch.tensor(float("nan"))
        worker.replica.progress = CoordinateProgress(0, 1, 1, 0, 0)
        worker.run(Op.SEND_ACTIVATION)

    with pytest.raises(EpochChangedError):
        worker.executor.attempt("train", body)
    assert "SEND_ACTIVATION" not in " ".join(worker.log)
    assert worker.replica.progress == before
    assert float(worker.engine.total_loss) == 1.0
    assert not worker.replica.losses
    assert not worker.replica.retained_outputs


@pytest.mark.parametrize("came", [True, False])
def test_error_in_a_pass_is_the_models_only_if_it_had_data(came: bool) -> None:
    worker = _Worker()
    if not came:
        worker.arrival.error = EpochChangedError("a worker was lost")

    def fail(*_: Any) -> None:
        raise ValueError("not a number")

    worker.executor._methods[Op.FNC] = fail
    with pytest.raises(ValueError if came else EpochChangedError):
        worker.executor.attempt("train", lambda: worker.run(Op.RECV_ACTIVATION, Op.FNC))


def test_pass_that_waits_for_the_device_is_freed_when_its_input_will_not_come() -> None:
    worker = _Worker()

    def wait_for_the_device(*_: Any) -> None:
        worker.interruption.announce_failure(JobFailure(worker="w1", kind="user_error", message="", traceback=""))
        assert worker.arrival.given_up.wait(20.0)

    worker.executor._methods[Op.FNC] = wait_for_the_device
    worker.arrival.error = JobFailedError("", origin="w1")
    with pytest.raises(JobFailedError):
        worker.executor.attempt("train", lambda: worker.run(Op.RECV_ACTIVATION, Op.FNC))
