"""The user's rules for a slot: how it enters its job, and when it replaces a worker."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from enum import Enum

from deepspeed_bamboo.coordination.records import FailureKind
from deepspeed_bamboo.elastic.hang_watch import HangRules
from deepspeed_bamboo.protocol import EXIT_TRY_AGAIN

# How often all workers start again when one is lost before the job has its first epoch.
MAX_RESTARTS = 3

# Ends of a job that the agent which records them tells of on its machine.
TOLD_BY_ONE: frozenset[FailureKind] = frozenset({"interrupted", "slots_lost", "no_machines", "stopped"})


def exit_code(failure: FailureKind, *, if_interrupted: int | None) -> int:
    """The exit code of an agent of a job that ended with such a failure. ``if_interrupted``: after a signal."""
    if failure in ("fatal_loss", "slots_lost", "no_coordinator", "no_machines", "hang"):
        return if_interrupted or EXIT_TRY_AGAIN
    return (if_interrupted or 1) if failure == "interrupted" else 1


class Entry(Enum):
    """How a slot's first worker enters the job."""

    START = "start"  # with all the others, at the job's beginning
    STANDBY = "standby"  # once the job has its first epoch
    JOIN = "join"  # by a command of its own, into a job that runs; it may leave again without ending the job


@dataclass(frozen=True)
class Rules:
    """``max_restarts``: how often a slot replaces a lost worker, first after ``restart_seconds``, then twice that...

    ``notice_signals`` to the agent are notices for its node, ``grace_seconds`` before its end. ``hangs``: what to do
    about a worker that stands still. A worker that ended because the job has expelled it is at fault itself if no
    epoch says so within ``expulsion_seconds``.
    """

    entry: Entry = Entry.START
    max_restarts: int = 0
    restart_seconds: float = 5.0
    notice_signals: frozenset[int] = frozenset({signal.SIGUSR1})
    grace_seconds: float = 30.0
    hangs: HangRules = field(default_factory=HangRules)
    expulsion_seconds: float = 10.0
