"""A gloo group of two workers, each of which has proved to the other that it knows the job secret.

Gloo takes the first process that connects for the peer. So each side first sends a pass word. If that fails (a
stranger was faster, sends nothing, or has closed the connection), both sides connect again, at a port that nobody
knows yet.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch

from deepspeed_bamboo.runtime.comm.c10d import c10d
from deepspeed_bamboo.runtime.comm.connection_errors import cause_of
from deepspeed_bamboo.runtime.comm.pair_store import PairStore, SharedStore
from deepspeed_bamboo.runtime.comm.pass_words import PASS_WORD_BYTES, PassWords
from deepspeed_bamboo.trust.handshake import StrangerError

logger = logging.getLogger(__name__)
_PASS_WORD_TAG = 4  # a channel uses those below
_ATTEMPTS = 5
CONNECTING_SECONDS = 10.0
"""Once both sides are there, so long at most until they are connected; then they try again."""


class PatientGroup:
    """A gloo group whose operations may take longer than it was given to connect.

    Gloo takes the limit of each wait from the start of the group, unless the wait itself has one.
    """

    def __init__(self, group: Any, *, timeout: timedelta) -> None:
        self._group = group
        self._timeout = timeout

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> PatientWork:
        """Begin to send; never blocks."""
        return PatientWork(self._group.send(tensors, to, tag), timeout=self._timeout)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> PatientWork:
        """Begin to receive; never blocks."""
        return PatientWork(self._group.recv(tensors, source, tag), timeout=self._timeout)

    def abort(self) -> None:
        """End all of it, as the end of this process would."""
        self._group.abort()


class PatientWork:
    """An operation of a :class:`PatientGroup`."""

    def __init__(self, work: Any, *, timeout: timedelta) -> None:
        self._work = work
        self._timeout = timeout

    def wait(self) -> None:
        """Until it is done. Raises RuntimeError when the peer is gone, and after the time-out."""
        self._work.wait(self._timeout)


def connect_proved(
    shared: SharedStore,
    *,
    name: str,
    first: bool,
    peer: str,
    secret: str,
    network: Any,
    timeout_seconds: float,
    wanted: Callable[[], bool] = lambda: True,
) -> PatientGroup:
    """The group of this worker and ``peer``, which calls this with the same ``name`` and the other ``first``.

    Args:
        shared: a store that only workers of the job can reach.
        name: of this group; no other ever has it.
        network: gloo's device, which all groups made at the same time may share.
        timeout_seconds: how long the peer is waited for, and a single operation of the group may take.
        wanted: False once nobody waits for the group any more, since the epoch has changed.

    Raises RuntimeError when the peer does not come, or has gone, and StrangerError when others are faster each time.
    """
    failure: Exception | None = None
    for attempt in range(_ATTEMPTS):
        words = PassWords(secret=secret, first=first)
        wait = timeout_seconds if failure is None else min(timeout_seconds, 2 * CONNECTING_SECONDS)
        store = PairStore(shared, name=f"{name}/{attempt}", pass_words=words, wait_seconds=wait)
        try:
            group = _group_of_two(store, 0 if first else 1, network=network if failure is None else network_device())
            _prove_to_each_other(group, words, other=1 if first else 0, peer=peer)
        except (RuntimeError, StrangerError) as error:
            if not (store.met and wanted()):
                raise failure or error from None  # nobody is there to try again with
            failure = error
            level = logging.WARNING if isinstance(error, StrangerError) else logging.INFO
            logger.log(level, "connecting to %s again, after: %s", peer, cause_of(error))
            continue
        return PatientGroup(group, timeout=timedelta(seconds=timeout_seconds))
    raise failure or RuntimeError("nothing was tried")


def network_device(environment: Mapping[str, str] | None = None) -> Any:
    """gloo's device on the interface named by GLOO_SOCKET_IFNAME (the first one), as torch's own groups use it.

    It has a thread that wakes up a hundred times a second, so groups made together share one: several would slow down
    whoever shares a processor with many workers. Each time a new one: gloo keeps connections of strangers that name a
    number in advance, and takes them for the peer with that number.

    Without that variable, which an agent sets, the one that this machine's name leads to: loopback on many. Raises
    RuntimeError when there is no such interface.
    """
    names = (os.environ if environment is None else environment).get("GLOO_SOCKET_IFNAME", "")
    interface = names.split(",")[0].strip()
    gloo = c10d.ProcessGroupGloo
    return gloo.create_device(interface=interface) if interface else gloo.create_default_device()


def _group_of_two(store: PairStore, rank: int, *, network: Any) -> Any:
    """A gloo group with the peer. Raises RuntimeError when the peer does not come."""
    options = c10d.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=CONNECTING_SECONDS)
    options._devices = [network]
    options._threads = 1  # for collectives, of which there are none
    return c10d.ProcessGroupGloo(store, rank, 2, options)


def _prove_to_each_other(group: Any, words: PassWords, *, other: int, peer: str) -> None:
    """Raises StrangerError unless whoever gloo has taken for the peer knows the pass word; RuntimeError."""
    said = torch.frombuffer(bytearray(words.own()), dtype=torch.uint8)
    sending = group.send([said], other, _PASS_WORD_TAG)
    heard = torch.zeros(PASS_WORD_BYTES, dtype=torch.uint8)
    group.recv([heard], other, _PASS_WORD_TAG).wait()
    words.check(heard.numpy().tobytes(), peer=peer)
    sending.wait()
