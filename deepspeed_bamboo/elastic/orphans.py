"""Ends a worker with its agent, however the agent ends."""

from __future__ import annotations

import ctypes
import os
import signal

from deepspeed_bamboo.elastic.processes import DeathWatch
from deepspeed_bamboo.protocol import AGENT_PID

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Make the kernel kill this process when the thread that forked it ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def die_with_agent() -> None:
    """Arrange for this process to be killed when the agent named by BAMBOO_AGENT_PID ends.

    By the kernel if the agent is the parent, which works even while this process is stopped or holds
    the GIL; and by a thread, for a worker that somebody else forked. Without the variable nothing is
    arranged. An agent that is gone already ends this process at once.
    """
    text = os.environ.get(AGENT_PID)
    if not text:
        return
    agent = int(text)
    if os.getppid() == agent:
        die_with_parent()
    DeathWatch([agent], lambda pid: os.kill(os.getpid(), signal.SIGKILL))
