"""To reach several peers at once, and to open lanes to some of them beside that."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

from deepspeed_bamboo.core.placement import WorkerId
from deepspeed_bamboo.runtime.comm.connection_errors import cause_of
from deepspeed_bamboo.runtime.comm.epoch_monitor import Interruption, PeerLostError
from deepspeed_bamboo.runtime.comm.lane_aborts import LaneAborts
from deepspeed_bamboo.runtime.comm.nccl import DeviceLanes
from deepspeed_bamboo.trust.handshake import StrangerError


class Attempts:
    """To reach peers, each in a thread of its own; what they raise is carried to the thread that waits for them."""

    def __init__(self, interruption: Interruption) -> None:
        self._interruption = interruption
        self._errors: list[Exception] = []
        self._ended = False

    @property
    def failed(self) -> bool:
        """Whether one of them did."""
        return bool(self._errors)

    @property
    def ended(self) -> bool:
        """Whether nobody needs what is still to be made."""
        return self._ended or self.failed

    def end(self) -> None:
        """Nobody waits any more."""
        self._ended = True

    def run(self, peer: WorkerId, build: Callable[[], None]) -> None:
        """Call ``build`` in the thread of ``peer``."""
        try:
            build()
        except (RuntimeError, ValueError, StrangerError) as error:
            self._errors.append(PeerLostError(peer, cause_of(error)))
        except Exception as error:  # noqa: BLE001 - a fault of this program, raised where somebody waits
            self._errors.append(error)
        self.notify()

    def notify(self) -> None:
        """Something that the thread that waits looks at has changed."""
        self._interruption.notify()

    def raise_first(self) -> None:
        """Raise what the first one raised, if any did: PeerLostError for what a peer or the network may cause."""
        for error in self._errors:
            raise error


class LaneOpening:
    """The lanes that one call of :meth:`Links.connect` opens, and its wait for those that are given up.

    Args:
        peers: to whom, in an order common to all workers.
        attempts: what goes wrong.
        aborts: what NCCL is giving up.
        open_to: opens those to one peer; told where to keep them until they are open, and what says that nobody waits.
        opened: called with all that are open, each time that there is one more.
    """

    def __init__(
        self,
        peers: Sequence[WorkerId],
        *,
        attempts: Attempts,
        aborts: LaneAborts,
        open_to: Callable[..., DeviceLanes],
        opened: Callable[[Mapping[WorkerId, DeviceLanes]], None],
    ) -> None:
        self._peers = peers
        self._attempts = attempts
        self._aborts = aborts
        self._open_to = open_to
        self._opened = opened
        self.lanes: dict[WorkerId, DeviceLanes] = {}
        self._half_open: dict[WorkerId, DeviceLanes] = {}
        self._settled = threading.Event()  # nothing is being given up any more

    def start(self) -> None:
        """Begin, on a thread of its own."""
        if self._peers or self._aborts.pending:
            threading.Thread(target=self._run, name="bamboo-lanes", daemon=True).start()
        else:
            self._settled.set()

    @property
    def complete(self) -> bool:
        """Whether all are open, and nothing is being given up."""
        return self._settled.is_set() and len(self.lanes) == len(self._peers)

    def abandon(self) -> None:
        """Give up what is half open; whoever waited has stopped."""
        for half_open in list(self._half_open.values()):
            half_open.abort()

    def _run(self) -> None:
        # One after the other: a communicator is made by both sides at once, and inside one process NCCL makes only one
        # at a time.
        for peer in self._peers:
            if not self._attempts.ended:
                self._attempts.run(peer, lambda peer=peer: self._open(peer))  # type: ignore[misc]
        # Both sides open lanes in one order, so that never holds up who still gives others up. What comes next may.
        self._aborts.wait()
        self._settled.set()
        self._attempts.notify()

    def _open(self, peer: WorkerId) -> None:
        self.lanes[peer] = self._open_to(peer, self._half_open, ended=lambda: self._attempts.ended)
        self._opened(self.lanes)
