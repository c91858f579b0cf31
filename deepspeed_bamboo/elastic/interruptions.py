"""Why a job was interrupted, in words for those who did not interrupt it."""

from __future__ import annotations

import signal

from deepspeed_bamboo.elastic.decisions import signal_name
from deepspeed_bamboo.elastic.slot import Slot


def by_signal(number: int, slot: Slot) -> str:
    """An agent was sent a signal that ends the job; launchers and terminals send some of them by themselves."""
    text = f"{signal_name(number)} was sent to the agent of rank {slot.rank} on {slot.node}"
    if number == signal.SIGHUP:
        return f"{text}; a terminal does that when it is closed"
    if number == signal.SIGTERM and slot.local_world_size > 1:
        return (
            f"{text}; a launcher does that to all its slots when one of them has ended. If nobody stopped this job, "
            "look at the output of the others"
        )
    return text


def by_lost_launcher(pid: int) -> str:
    """The launcher, or the deepspeed command above it, has ended before its slots."""
    return f"the launcher (process {pid}) is gone, killed perhaps, and its workers end with it"


def before_training(reason: str) -> str:
    """The job was asked to end, for ``reason``, when it had no epoch yet."""
    return f"it was stopped before training began ({reason}); nothing was trained, and the exit code is 1"
