"""The events that an agent receives, and the actions that it can decide on."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deepspeed_bamboo.coordination import Change, EpochRecord, JobFailure, Roster
from deepspeed_bamboo.core.placement import WorkerId
from deepspeed_bamboo.elastic.assembly import Seat
from deepspeed_bamboo.elastic.hang_watch import Hang

# -- events ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WorkerExited:
    """The own worker has ended. ``code`` is negative for a signal; ``report`` is its traceback, if it wrote one."""

    worker: WorkerId
    code: int
    report: str


@dataclass(frozen=True)
class Changed:
    """Something changed in the job."""

    change: Change


@dataclass(frozen=True)
class Signalled:
    """This agent was sent a signal."""

    number: int


@dataclass(frozen=True)
class LauncherGone:
    """The launcher ``pid`` has ended. ``command``: it was the ``deepspeed`` command itself, not a node's launcher."""

    pid: int
    command: bool


@dataclass(frozen=True)
class CoordinatorGone:
    """The job's own etcd is gone for good, or knows of another run; without it the workers can't agree on anything."""

    reason: str


@dataclass(frozen=True)
class LossSettled:
    """The answer to a reported loss: an epoch, or (None) the end of the job or a new start of all workers.

    ``generation``: the one that has begun, when the workers start again; ``reason``: why the worker was lost.
    """

    workers: tuple[WorkerId, ...]
    epoch: EpochRecord | None
    reason: str = ""
    generation: int | None = None


@dataclass(frozen=True)
class SlotsChecked:
    """Of the slots that were checked while workers start, ``absent`` are certainly gone."""

    absent: tuple[int, ...]


@dataclass(frozen=True)
class FailureRecorded:
    """``failure`` was proposed as the reason for the job's end. ``first``: it is that reason.

    When the coordinator could not be asked in time it is ``first``: this agent acts on what it knows.
    """

    failure: JobFailure
    first: bool


@dataclass(frozen=True)
class Suspected:
    """The own worker cannot talk to ``worker``, whose process is gone; the agent beside that one has not judged yet."""

    worker: WorkerId
    reason: str


@dataclass(frozen=True)
class Stuck:
    """The own worker stands still; ``stack``: where its main thread is, if that is known."""

    worker: WorkerId
    hang: Hang
    stack: str


@dataclass(frozen=True)
class WentOn:
    """The own worker does not stand still any more, after so many seconds."""

    worker: WorkerId
    seconds: float


@dataclass(frozen=True)
class Woken:
    """The time that WakeAfter asked for is over."""

    reason: str


Event = (
    WorkerExited
    | Changed
    | Signalled
    | LauncherGone
    | CoordinatorGone
    | LossSettled
    | SlotsChecked
    | FailureRecorded
    | Stuck
    | Suspected
    | WentOn
    | Woken
)

# -- actions ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StartWorker:
    """Start a worker of this generation, with the id ``worker``; ``joining``: into a job that runs.

    ``seat``: where it starts anew with others.
    """

    worker: WorkerId
    generation: int
    joining: bool = False
    seat: Seat | None = None


@dataclass(frozen=True)
class KillWorker:
    """SIGKILL to the own worker, at once."""

    reason: str


@dataclass(frozen=True)
class EndWorker:
    """SIGTERM to the own worker, SIGKILL when it is still there a few seconds later."""


@dataclass(frozen=True)
class ReportLoss:
    """Make the next epoch without ``worker``, which is certainly gone, and remove its key."""

    worker: WorkerId
    reason: str
    generation: int


@dataclass(frozen=True)
class CheckVanished:
    """The key of ``worker`` is gone: find out whether that means a loss, and if so report it."""

    worker: WorkerId


@dataclass(frozen=True)
class CheckSlots:
    """The agents of these slots are gone while workers start: find out whether they come back."""

    ranks: tuple[int, ...]


@dataclass(frozen=True)
class OfferSlot:
    """Tell all agents that this slot could start a worker, in the epoch of this number, in which they wait."""

    epoch: int


@dataclass(frozen=True)
class StartAnew:
    """Make the epoch after ``epoch``, in which agents wait, in which the workers of ``roster`` start."""

    epoch: EpochRecord
    roster: Roster


@dataclass(frozen=True)
class AssembleAgain:
    """Have agents wait again, for some of those that start in ``epoch`` are gone."""

    epoch: EpochRecord
    reason: str


@dataclass(frozen=True)
class CheckSuspect:
    """The own worker cannot talk to ``worker``: find out whether its process is gone, and if so report the loss.

    Unless an agent is beside that process: it knows how the process ended, and whether that is a loss. Then Suspected
    comes in a moment.
    """

    worker: WorkerId
    reason: str


@dataclass(frozen=True)
class MarkEnded:
    """Record that ``worker`` ended its script well, or was drained, and remove its key."""

    worker: WorkerId
    generation: int
    drained: bool = False


@dataclass(frozen=True)
class Withdraw:
    """Remove the key of ``worker``, whose process is gone, without a loss."""

    worker: WorkerId


@dataclass(frozen=True)
class RequestDrain:
    """Ask the job to leave ``node`` within so many seconds."""

    node: str
    deadline_seconds: float
    reason: str


@dataclass(frozen=True)
class ForgetDrain:
    """The workers of ``node`` have left it: remove the request once none is there any more."""

    node: str


@dataclass(frozen=True)
class Fail:
    """Propose ``failure`` as the reason for the job's end."""

    failure: JobFailure


@dataclass(frozen=True)
class Finish:
    """Record that the job is complete."""

    reason: str


@dataclass(frozen=True)
class PublishHang:
    """Tell all agents that ``worker`` stands still, or (None) that it no longer does."""

    worker: WorkerId
    facts: Mapping[str, Any] | None


@dataclass(frozen=True)
class Say:
    """Tell the user. ``once``: only if no other agent of the job on this machine has spoken for all."""

    text: str
    once: bool = False


@dataclass(frozen=True)
class WakeAfter:
    """Hear Woken(reason) in so many seconds."""

    seconds: float
    reason: str


@dataclass(frozen=True)
class Leave:
    """End this agent with ``code``."""

    code: int


Action = (
    StartWorker
    | KillWorker
    | EndWorker
    | ReportLoss
    | CheckVanished
    | CheckSlots
    | OfferSlot
    | StartAnew
    | AssembleAgain
    | CheckSuspect
    | MarkEnded
    | Withdraw
    | RequestDrain
    | ForgetDrain
    | Fail
    | Finish
    | PublishHang
    | Say
    | WakeAfter
    | Leave
)


def how_it_ended(code: int) -> str:
    """``code`` of a process in words."""
    if code >= 0:
        return f"ended with exit code {code}"
    return f"was killed by {signal_name(-code)}"


def signal_name(number: int) -> str:
    """``SIGTERM``; ``signal 40`` for one without a name, as most real-time signals are."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
