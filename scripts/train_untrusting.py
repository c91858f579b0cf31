"""scripts/train_sleeping.py for bench_authentication.py: without what authenticates channels, or without the pulse.

    python scripts/train_untrusting.py VARIANT [options of train_sleeping.py]

``as-is``: nothing is changed. ``bare``: channels between workers are made at torch's TCPStore, by gloo alone, as they
would be if nobody had to prove anything; whoever is to meet has connected to those stores beforehand, too.
``no-pulse``: the main thread notes nowhere what it does. After a loss the job waits for a worker that takes the lost
one's place.
"""

from __future__ import annotations

import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any

import train_sleeping
from train_replaced import waits_for_a_replacement

from deepspeed_bamboo.pulse import Pulse
from deepspeed_bamboo.runtime.comm.c10d import c10d
from deepspeed_bamboo.runtime.comm.channel import Channel
from deepspeed_bamboo.runtime.comm.peers import Links
from deepspeed_bamboo.runtime.comm.proved_group import PatientGroup, _group_of_two

_PORT = "bare/port"
_LIMIT = timedelta(seconds=30)


class BareMeetings:
    """Where the workers of a job meet without any proof: torch's store in each, and clients that are kept."""

    def __init__(self) -> None:
        self._server = c10d.TCPStore("127.0.0.1", 0, None, True, _LIMIT, wait_for_workers=False)
        self._idle: dict[str, list[Any]] = defaultdict(list)
        self._ports: dict[str, int] = {}

    def announce(self, store: Any) -> None:
        """Let the others find it, in this worker's own guarded ``store``."""
        store.set(_PORT, str(self._server.port).encode())

    def take(self, links: Any, worker: str) -> Any:
        """A client of ``worker``'s store that nobody else uses."""
        idle = self._idle[worker]
        return idle.pop() if idle else self._new(links, worker)

    def keep(self, worker: str, client: Any) -> None:
        """For the next use."""
        self._idle[worker].append(client)

    def acquaint(self, links: Any, peers: Callable[[], Iterable[str]]) -> None:
        """As Links.acquaint: a client for each of ``peers()``, made in another thread, and some of this one's own."""

        def meet() -> None:
            for peer in peers():
                first = min(peer, links._me, key=links._order.index)
                try:
                    self.keep(first, self._new(links, first))
                except (RuntimeError, OSError, KeyError):
                    continue  # it has gone

        threading.Thread(target=meet, name="bench-acquaintances", daemon=True).start()

    def _new(self, links: Any, worker: str) -> Any:
        port = self._server.port if worker == links._me else self._ports.get(worker)
        if port is None:
            with links.store_of(worker) as store:
                port = self._ports[worker] = int(store.fetch(_PORT, within_seconds=_LIMIT.total_seconds()))
        return c10d.TCPStore("127.0.0.1", port, None, False, _LIMIT)


def authenticate_nothing() -> None:
    """Have all channels that this process makes from now on be made by gloo and torch's store alone."""
    meetings, begin = BareMeetings(), Links.__init__

    def announced(self: Any, me: str, *, own_store: Any = None, **rest: Any) -> None:
        begin(self, me, own_store=own_store, **rest)
        if own_store is not None:
            meetings.announce(own_store)

    def bare_channel(self: Any, peer: str, network: Any) -> Channel:
        pair = sorted((self._me, peer), key=self._order.index)
        first, client = pair[0] == self._me, meetings.take(self, pair[0])
        store = c10d.PrefixStore(f"{self._name}/{pair[0]}/{pair[1]}", client)
        group = PatientGroup(
            _group_of_two(store, 0 if first else 1, network=network),
            timeout=timedelta(seconds=self._timeout_seconds),
        )
        meetings.keep(pair[0], client)
        return Channel(group, first=first, peer=peer, interruption=self._interruption)

    changes: Mapping[str, Any] = {
        "__init__": announced,
        "_channel_to": bare_channel,
        "acquaint": lambda self, peers: meetings.acquaint(self, peers),
    }
    for name, change in changes.items():
        setattr(Links, name, change)


def note_nothing() -> None:
    """Have this process's main thread keep what it does to itself."""
    for name in ("at", "_write"):
        setattr(Pulse, name, lambda *_: None)


VARIANTS: Mapping[str, Callable[[], None]] = {
    "as-is": lambda: None,
    "bare": authenticate_nothing,
    "no-pulse": note_nothing,
}


if __name__ == "__main__":
    VARIANTS[sys.argv[1]]()
    sys.exit(train_sleeping.main(sys.argv[2:], between_steps=waits_for_a_replacement))
