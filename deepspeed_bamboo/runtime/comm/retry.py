"""Asks the coordinator for what a worker can't continue without, through an outage of any length.

Training needs no coordinator while nobody is lost. A loss or a reconfiguration needs it, and waits for its return: an
error here would end the job of a user whose etcd restarts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from deepspeed.utils import logger

from deepspeed_bamboo.coordination import CoordinatorUnavailable
from deepspeed_bamboo.runtime.comm.epoch_monitor import Interruption

T = TypeVar("T")

_PAUSE_SECONDS = 0.2


def with_retries(call: Callable[[], T], *, interruption: Interruption) -> T:
    """What ``call`` returns, made again until the coordinator answers; it must bear being made twice.

    Raises what interrupts a wait (see :class:`Interruption`): the agent ends the job when the job's own etcd stays
    away, and the user may at any time.
    """
    said = False
    while True:
        try:
            return call()
        except CoordinatorUnavailable as error:
            if not said:
                logger.warning(f"waiting for the coordinator, without which this can't go on: {error}")
            said = True
        interruption.wait_until(lambda: False, timeout_seconds=_PAUSE_SECONDS)
