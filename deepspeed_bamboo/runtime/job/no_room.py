"""A device that runs out of memory since a loss: its worker does the work of two, or gets a shadow more."""

from __future__ import annotations

import contextlib

import torch

from deepspeed_bamboo import news
from deepspeed_bamboo.coordination import CoordinatorUnavailable, JobFailure
from deepspeed_bamboo.core.consensus import Conclusion
from deepspeed_bamboo.protocol import EXIT_EXPELLED, EXIT_JOB_FAILED
from deepspeed_bamboo.runtime.job.session import WorkerSession

_REMEDY = (
    "start the same command again with more machines, or leave more room on devices: smaller micro-batches, activation "
    'checkpointing, redundancy.copies 1, or redundancy.mode "off"'
)


def is_for_want_of_machines(error: BaseException, *, last_loss: Conclusion | None) -> bool:
    """Whether ``error`` says that a device is full, in a job that had a loss: with more machines it would go on."""
    return isinstance(error, torch.OutOfMemoryError) and last_loss is not None


def end_for_want_of_machines(session: WorkerSession, error: BaseException) -> int:
    """Have all start anew from the store, where agents wait for machines, or end the job; returns this worker's exit
    code. It is no error of the script, and the same command continues."""
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    reason = f"worker {session.worker} has no room on its device for what losses have given it ({first})"
    record = session.interruption.active
    news.say(reason)
    with contextlib.suppress(CoordinatorUnavailable):
        if record is not None and record.waits_seconds:
            session.coordinator.wait_for_machines(record, reason=reason, proposer=session.worker)
            return EXIT_EXPELLED
        session.coordinator.fail(JobFailure(session.worker, "fatal_loss", f"{reason}; {_REMEDY}", ""))
    return EXIT_JOB_FAILED
