"""All channels of one worker in one epoch: made together, looked up by worker, dropped together."""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch

from deepspeed_bamboo.coordination import Member
from deepspeed_bamboo.core.placement import WorkerId
from deepspeed_bamboo.runtime.comm.c10d import c10d
from deepspeed_bamboo.runtime.comm.channel import Channel, Message, Meter
from deepspeed_bamboo.runtime.comm.epoch_monitor import Interruption
from deepspeed_bamboo.runtime.comm.guarded_store import StoreClient
from deepspeed_bamboo.runtime.comm.lane_aborts import LaneAborts
from deepspeed_bamboo.runtime.comm.lane_opening import Attempts, LaneOpening
from deepspeed_bamboo.runtime.comm.nccl import DeviceLanes
from deepspeed_bamboo.runtime.comm.pair_store import SharedStore
from deepspeed_bamboo.runtime.comm.proved_group import connect_proved, network_device


class Links:
    """Messages between this worker and the others it has to talk to, found by key.

    A message that arrives before it is wanted is put aside, so the order in which two workers ask need not
    match. A message to oneself (a worker that hosts both coordinates) never leaves the process.
    """

    def __init__(
        self,
        me: WorkerId,
        *,
        interruption: Interruption,
        timeout_seconds: float,
        device: torch.device,
        secret: str,
        own_store: SharedStore | None = None,
    ) -> None:
        """``secret``: the job's, which every peer has to know. ``own_store``: what this worker serves to them."""
        self._me = me
        self._device = device
        self._interruption = interruption
        self._timeout_seconds = timeout_seconds
        self._secret = secret
        self._own_store = own_store
        self._members: dict[WorkerId, Member] = {}
        self._order: tuple[WorkerId, ...] = ()
        self._name = ""
        self._channels: dict[WorkerId, Channel] = {}
        # Clients of other workers' stores that nobody is using, by address and port.
        self._idle_clients: dict[tuple[str, int], list[Any]] = defaultdict(list)
        self._aside: dict[WorkerId, dict[str, Message]] = defaultdict(dict)
        self._aborts = LaneAborts(interruption.notify)

    def beside(self, interruption: Interruption, *, name: str) -> Links:
        """Other channels in the same epoch, without lanes: for another thread, whose waits ``interruption`` ends.

        Both sides of each use the same ``name``.
        """
        other = Links(
            self._me,
            interruption=interruption,
            timeout_seconds=self._timeout_seconds,
            device=torch.device("cpu"),
            secret=self._secret,
            own_store=self._own_store,
        )
        other._idle_clients = self._idle_clients
        other.extend(members=self._members, order=self._order, name=f"{self._name}/{name}")
        return other

    def enter(self, *, members: Mapping[WorkerId, Member], order: Sequence[WorkerId], name: str) -> None:
        """Drop the channels of the previous epoch; later ones are made at the store of each pair's first in ``order``.

        Every worker of the epoch calls this with the same ``order`` and ``name`` (job and epoch).
        """
        self.close()
        self.extend(members=members, order=order, name=name)

    def extend(self, *, members: Mapping[WorkerId, Member], order: Sequence[WorkerId], name: str) -> None:
        """Go on with the channels there are; those to workers outside ``order`` are dropped, new ones made as above.

        Every worker of the new epoch calls this with the same ``order`` and ``name``, at an iteration boundary.
        """
        gone = {peer: channel for peer, channel in self._channels.items() if peer not in order}
        for peer in gone:
            del self._channels[peer]
            self._aside.pop(peer, None)
        _close(gone)
        # A worker whose registration is being renewed is missing in ``members`` for a moment, and is where it was.
        self._members = {**{w: its for w, its in self._members.items() if w in order}, **members}
        self._order = tuple(order)
        self._name = name

    def connect(self, peers: Iterable[WorkerId], *, with_lanes: Iterable[WorkerId] = ()) -> None:
        """Build a channel to every worker in ``peers``, all at once; each of them does the same for this one.

        The ones in ``with_lanes`` get lanes for device tensors too, also where there was a channel without. Returns
        once NCCL has given up all lanes that were dropped before, see :mod:`lane_aborts`. Raises PeerLostError, or what
        interrupts the wait; what was half built is dropped.
        """
        peers = [peer for peer in dict.fromkeys(peers) if peer != self._me]
        wanted = [peer for peer in peers if peer not in self._channels]
        # Only the groups keep it: they end its thread without Python's lock, which takes 10 ms.
        network = network_device() if wanted else None
        made: dict[WorkerId, Channel] = {}
        attempts = Attempts(self._interruption)
        opening = LaneOpening(
            # In an order common to all workers.
            sorted(
                self._without_lanes(set(peers) & set(with_lanes)),
                key=lambda peer: sorted(map(self._order.index, (self._me, peer))),
            ),
            attempts=attempts,
            aborts=self._aborts,
            open_to=self._open_lanes,
            # A channel that there was before has a reader that may need them at once.
            opened=self._use_lanes,
        )

        def build_channel(peer: WorkerId) -> None:
            attempts.run(peer, lambda: made.update({peer: self._channel_to(peer, network)}))

        for peer in wanted:
            threading.Thread(target=build_channel, args=(peer,), name=f"bamboo-link-{peer}", daemon=True).start()
        opening.start()
        try:
            self._interruption.wait_until(lambda: attempts.failed or (len(made) == len(wanted) and opening.complete))
        finally:
            attempts.end()
            self._channels.update(made)
            self._use_lanes(opening.lanes)
            opening.abandon()
        attempts.raise_first()

    def _use_lanes(self, lanes: Mapping[WorkerId, DeviceLanes]) -> None:
        for peer in set(lanes) & set(self._channels):
            self._channels[peer].lanes = lanes[peer]

    def meet(self, peers: Iterable[WorkerId]) -> None:
        """Channels to all of ``peers`` that there are none to yet. Each of them does the same for this worker.

        All at once: if each was made when it is first used, workers could wait for each other in a circle.
        """
        missing = set(peers) - self._channels.keys() - {self._me}
        if missing:
            self.connect(missing)

    def _without_lanes(self, peers: set[WorkerId]) -> list[WorkerId]:
        """Those of ``peers`` that lanes are yet to be made to, in an order of no meaning."""
        if self._device.type != "cuda":
            return []
        return [peer for peer in peers if peer not in self._channels or self._channels[peer].lanes is None]

    @contextmanager
    def _store_for(self, peer: WorkerId) -> Iterator[tuple[Any, bool]]:
        """A store that only this pair uses in this epoch, and whether this worker is the first of the pair.

        One client per use: a thread that waits in a client blocks every other use of it. One that served is kept
        for the next epoch, since making one may take a name server's time-out; one that failed may be waiting still.
        """
        pair = sorted((self._me, peer), key=self._order.index)
        with self.store_of(pair[0]) as store:
            yield c10d.PrefixStore(f"{self._name}/{pair[0]}/{pair[1]}", store), pair[0] == self._me

    def acquaint(self, peers: Callable[[], Iterable[WorkerId]]) -> None:
        """Have a client of the store of each of ``peers()`` that this worker would meet there; never waits or raises.

        ``peers`` is called in another thread.
        """
        members, order = self._members, self._order

        def meet() -> None:
            for peer in peers():
                host = members.get(peer)
                if host is None or order.index(peer) >= order.index(self._me):
                    continue  # they meet at this worker's own
                with contextlib.suppress(RuntimeError, OSError):
                    idle = self._idle_clients[host.address, host.store_port]
                    if not idle:
                        idle.append(self._new_client(host))

        threading.Thread(target=meet, name="bamboo-acquaintances", daemon=True).start()

    @contextmanager
    def store_of(self, worker: WorkerId) -> Iterator[Any]:
        """A client, for this use alone, of the store that ``worker`` serves. Raises RuntimeError when it is gone."""
        host = self._members.get(worker)
        if host is None:
            raise RuntimeError(f"worker {worker} is not registered, so nobody knows its address")
        idle = self._idle_clients[host.address, host.store_port]
        store = None
        while store is None:
            try:
                found = idle.pop()
            except IndexError:  # only asking tells: threads take from it, too
                store = self._new_client(host)
            else:
                store = found if found.is_open() else None
        yield store
        idle.append(store)

    def _new_client(self, host: Member) -> StoreClient:
        timeout = timedelta(seconds=self._timeout_seconds)
        return StoreClient(host.address, host.store_port, secret=self._secret, timeout=timeout)

    @property
    def members(self) -> Mapping[WorkerId, Member]:
        """The members of the epoch."""
        return self._members

    def _channel_to(self, peer: WorkerId, network: Any) -> Channel:
        pair, epoch = sorted((self._me, peer), key=self._order.index), self._name
        first = pair[0] == self._me
        with self._shared_store(pair[0]) as store:
            group = connect_proved(
                store,
                name=f"{epoch}/{pair[0]}/{pair[1]}",
                first=first,
                peer=peer,
                secret=self._secret,
                network=network,
                timeout_seconds=self._timeout_seconds,
                wanted=lambda: self._name == epoch,
            )
        return Channel(group, first=first, peer=peer, interruption=self._interruption)

    @contextmanager
    def _shared_store(self, worker: WorkerId) -> Iterator[SharedStore]:
        """What ``worker`` serves; without a connection where that is this one."""
        if worker == self._me and self._own_store is not None:
            yield self._own_store
        else:
            with self.store_of(worker) as store:
                yield store

    def _open_lanes(
        self, peer: WorkerId, opening: dict[WorkerId, DeviceLanes], *, ended: Callable[[], bool]
    ) -> DeviceLanes:
        with self._store_for(peer) as (store, first):
            opening[peer] = DeviceLanes(
                c10d.PrefixStore("lanes", store),
                first=first,
                device=self._device,
                timeout_seconds=self._timeout_seconds,
                aborts=self._aborts,
            )
            if ended():  # whoever ended it may not have seen these
                opening[peer].abort()
                raise RuntimeError("nobody waits for these lanes any more")
            opening[peer].open()
        return opening.pop(peer)

    def send(self, worker: WorkerId, message: Message) -> None:
        """Send without waiting. Tensors must stay unchanged up to the next agreement."""
        if worker == self._me:
            self._aside[worker][message.key] = message
        else:
            self._channel(worker).send(message)

    def receive(
        self, worker: WorkerId, key: str, *, unseen: bool = False, started: bool = False, meter: Meter | None = None
    ) -> Message:
        """The message ``key`` from ``worker``; waits for it. Raises PeerLostError or what interrupts the wait.

        ``unseen``, ``started``: its tensors need not be there yet, see :meth:`Channel.receive`. ``meter`` counts bytes.
        """
        aside = self._aside[worker]
        while key not in aside:
            if worker == self._me:
                raise RuntimeError(f"message {key!r} to oneself was never sent: the plan is wrong")
            options = {"unseen": key if unseen else None, "started": key if started else None}
            message = self._channel(worker).receive(**options, meter=meter)
            aside[message.key] = message
        return aside.pop(key)

    def announce(self, worker: WorkerId, key: str, *, kind: str) -> None:
        """The next message to ``worker`` will be ``key``, most likely like the last one of its ``kind``."""
        if worker != self._me:
            self._channel(worker).announce(key, kind=kind)

    def forget_forms(self) -> None:
        """Between iterations: what this worker sends from now on may have other shapes than before."""
        for channel in self._channels.values():
            channel.forget_forms()

    def expect(self, messages: Mapping[WorkerId, int]) -> None:
        """So many messages are sure to come from each worker: receive them ahead of their use."""
        for worker, count in messages.items():
            if worker != self._me:
                self._channel(worker).expect(count)

    def drain(self) -> None:
        """Let go of what everybody has received for certain; after an agreement. Never waits for a peer."""
        for channel in self._channels.values():
            channel.drain()

    def flush(self, *, within_seconds: float) -> None:
        """Wait until everything sent is received, for no longer than that for each peer: before this process ends."""
        for channel in self._channels.values():
            channel.flush(within_seconds=within_seconds)

    def close(self) -> None:
        """Drop all channels and whatever was put aside. Never blocks."""
        channels, self._channels = self._channels, {}
        self._aside.clear()
        _close(channels)

    def _channel(self, worker: WorkerId) -> Channel:
        if worker not in self._channels:
            self.connect([worker])
        return self._channels[worker]


def _close(channels: dict[WorkerId, Channel]) -> None:
    """Close them, and let go of what is behind them in another thread: gloo takes 10 ms and more for each."""
    for channel in channels.values():
        channel.close()
    if channels:
        threading.Thread(target=channels.clear, name="bamboo-burial").start()
