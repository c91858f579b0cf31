"""The states of an agent's own worker."""

from __future__ import annotations

from enum import Enum


class Own(Enum):
    """See the module."""

    WAITING = "waiting"  # not started yet: there is no job to join
    RUNNING = "running"
    UNEXPLAINED = "unexplained"  # gone; what for is about to be known
    RENEWED = "renewed"  # killed, to start anew with others, since nobody is left who can train
    REPLACED = "replaced"  # killed, to be started again
    ENDING = "ending"  # told to end, because the job ends
    ENDED = "ended"  # its script is over, without an error
    LOST = "lost"  # gone as a lost node
    DRAINED = "drained"  # left as it was asked to
    UNFIT = "unfit"  # its script raised before it had a part in the job
    FAILED = "failed"  # its script raised
