"""The coordinator is silent while it is needed: in a recovery, and at the end. It is waited for, and nothing fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from deepspeed_bamboo.coordination import CoordinatorUnavailable, JobFailure
from deepspeed_bamboo.errors import JobFailedError
from deepspeed_bamboo.runtime.comm.epoch_monitor import Interruption
from deepspeed_bamboo.runtime.comm.retry import with_retries
from deepspeed_bamboo.runtime.job.session import WorkerSession
from deepspeed_bamboo.runtime.recovery.regroup import Recovery
from tests.runtime.jobs import Jobs
from tests.runtime.scenarios import Training, train
from tests.runtime.test_losses import kill

_BUDGET_SECONDS = 0.3
_OUTAGE_SECONDS = 2.5  # several times what a worker's call tries for
_THAW = "import os, signal, sys, time; time.sleep(float(sys.argv[1])); os.kill(int(sys.argv[2]), signal.SIGCONT)"


def train_through_outages(training: Training, etcd_pid: int) -> Any:
    """Worker w0 freezes etcd for a while when it has handed in its report of a loss, and when its script ends."""
    first = os.environ["RANK"] == "0"
    stock_recovery, stock_finish, stock_register = Recovery.__init__, WorkerSession.finish, WorkerSession.register

    def freeze() -> None:
        if first:
            os.kill(etcd_pid, signal.SIGSTOP)
            subprocess.Popen([sys.executable, "-S", "-c", _THAW, str(_OUTAGE_SECONDS), str(etcd_pid)])

    def register(session: WorkerSession, *, rank: int, home: int) -> None:
        stock_register(session, rank=rank, home=home)
        session.coordinator._store._connection._call_timeout_seconds = _BUDGET_SECONDS

    def recovery(self: Recovery, *args: Any, point: Callable[[str], None], **kwargs: Any) -> None:
        stock_recovery(self, *args, point=lambda at: (freeze() if at == "reported" else None, point(at)), **kwargs)

    def finish(session: WorkerSession, *, step: int) -> None:
        freeze()
        stock_finish(session, step=step)

    WorkerSession.register = register  # type: ignore[method-assign]
    Recovery.__init__ = recovery  # type: ignore[method-assign, assignment]
    WorkerSession.finish = finish  # type: ignore[method-assign]
    return train(training)


def test_a_loss_and_the_end_bear_an_outage(jobs: Jobs) -> None:
    # The outage is longer than the leases, which all run out.
    patience = {"coordinator": {"lease_seconds": 1.0, "suspicion_seconds": 5.0}}
    training = Training("outages", 3, steps=3, faults=[kill(1, 0, 1, "forward", 2)], bamboo=patience)
    result = jobs.run(train_through_outages, world=3, training=training, etcd_pid=jobs.etcd_pid)
    assert result.codes == [0, -9, 0], result.transcript()
    assert result.common("steps") == 3
    assert "waiting for the coordinator" in result.transcript()


def unavailable() -> CoordinatorUnavailable:
    return CoordinatorUnavailable(endpoints=["etcd:1"], tried_seconds=1.0, reason="UNAVAILABLE: refused")


def test_what_is_insisted_upon_is_asked_until_there_is_an_answer() -> None:
    answers: list[Any] = [unavailable(), unavailable(), "yes"]

    def call() -> str:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return str(answer)

    assert with_retries(call, interruption=Interruption()) == "yes"
    assert answers == []


def test_a_failure_of_the_job_ends_the_waiting() -> None:
    interruption = Interruption()
    failure = JobFailure(worker="w1", kind="user_error", message="over", traceback="")
    threading.Timer(0.1, interruption.announce_failure, [failure]).start()

    def call() -> None:
        raise unavailable()

    with pytest.raises(JobFailedError, match="over"):
        with_retries(call, interruption=interruption)
