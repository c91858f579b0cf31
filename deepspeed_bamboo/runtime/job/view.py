"""The job as a worker knows it now: the epoch, and who hosts and shadows what. One part writes it."""

from __future__ import annotations

from dataclasses import dataclass

from deepspeed_bamboo.coordination import EpochRecord
from deepspeed_bamboo.core.placement import Placement, WorkerId
from deepspeed_bamboo.runtime.comm.epoch_monitor import Interruption


@dataclass(frozen=True)
class View:
    """The epoch in which the main thread works, and the placement in it.

    ``placement`` has more shadows than the record's from the moment at which all have agreed that they are there until
    the next epoch says so.
    """

    record: EpochRecord
    placement: Placement

    @property
    def epoch(self) -> int:
        """The number of the epoch."""
        return self.record.number

    @property
    def members(self) -> tuple[WorkerId, ...]:
        """The workers of the epoch, in their order."""
        return self.record.members


class CurrentView:
    """The current view. The main thread alone changes it, with :meth:`adopt`.

    Args:
        interruption: the epoch monitor, which ends the main thread's waits when an epoch comes that is not the view's.
    """

    def __init__(self, interruption: Interruption) -> None:
        self._interruption = interruption
        self._now: View | None = None

    @property
    def now(self) -> View:
        """The view. Raises RuntimeError before the first epoch."""
        if self._now is None:
            raise RuntimeError("no epoch has been entered")
        return self._now

    @property
    def entered(self) -> bool:
        """True once there is a view."""
        return self._now is not None

    def adopt(self, record: EpochRecord, placement: Placement) -> None:
        """Work in ``record`` with ``placement`` from now on; only newer epochs interrupt the main thread's waits."""
        if self._now is None or record is not self._now.record:
            self._interruption.enter(record)
        self._now = View(record, placement)

    def place(self, placement: Placement) -> None:
        """The placement changes within the epoch: shadows have come."""
        self.adopt(self.now.record, placement)
