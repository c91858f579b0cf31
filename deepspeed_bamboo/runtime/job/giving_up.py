"""What is left to do when nobody who is left can go on: all start anew, or the job ends."""

from __future__ import annotations

from deepspeed_bamboo.coordination import EpochRecord, JobFailure
from deepspeed_bamboo.runtime.job.session import WorkerSession


def give_up(session: WorkerSession, record: EpochRecord, *, failure: JobFailure, why: str) -> None:
    """All start anew, where agents wait for that (then ExpelledError), or the job ends with ``failure``.

    ``record`` is the epoch of now, ``why`` what starting anew is for. Raises JobFailedError, too, or
    EpochChangedError where there is news.
    """
    if record.waits_seconds:
        _start_anew(session, record, why)
    session.with_retries(lambda: session.coordinator.fail(failure))
    session.interruption.announce_failure(failure)
    session.interruption.check()


def _start_anew(session: WorkerSession, record: EpochRecord, why: str) -> None:
    """This worker ends, and its agent starts another."""
    reason = f"all workers start anew {why}"
    wait = session.coordinator.wait_for_machines
    session.with_retries(lambda: wait(record, reason=reason, proposer=session.worker))
    newest = session.with_retries(session.coordinator.epoch)
    if newest is not None and not newest.trains:
        session.interruption.announce_expulsion(newest.reason)
    elif newest is not None:
        session.interruption.announce_epoch(newest)
    session.interruption.check()
