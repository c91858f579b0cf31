"""What it takes the survivors of a loss to connect anew, with the handshakes of the job secret and without.

    python scripts/bench_connections.py                          # 4 workers of which 3 survive, 100 times each
    python scripts/bench_connections.py --survivors 5 --rounds 20

Survivors are processes of this machine. In turn, in the same run, all of them connect to all others

- ``bare``: by torch's TCPStore and gloo, without any authentication (how it was before there was a job secret),
- ``met``: as the plugin does after a loss, when each survivor has a connection to the others' stores,
- ``unmet``: the same, when none has; so it was for workers that had had nothing to do with each other before.

Printed are milliseconds, medians with quartiles, of the slowest survivor of each round.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import secrets
import statistics
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import torch

from deepspeed_bamboo.coordination import Member
from deepspeed_bamboo.runtime.comm.c10d import c10d
from deepspeed_bamboo.runtime.comm.epoch_monitor import Interruption
from deepspeed_bamboo.runtime.comm.peers import Links
from deepspeed_bamboo.runtime.comm.proved_group import network_device
from deepspeed_bamboo.runtime.comm.store_server import StoreServer

VARIANTS = ("bare", "met", "unmet")
_SECONDS = 30.0
_WARM_UP = 3
_BURIAL = "bamboo-burial"


class Survivor:
    """One of them, in its own process."""

    def __init__(self, index: int, *, count: int, secret: str, mailbox: Any, barrier: Any) -> None:
        self._barrier, self._index, self._secret = barrier, index, secret
        self._server = StoreServer("127.0.0.1", secret=secret)
        bare = c10d.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=_SECONDS), wait_for_workers=False)
        mailbox[index] = (self._server.port, bare.port)
        barrier.wait()
        self._own_bare = bare
        self._names = [f"worker-{number}" for number in range(count)]
        self._members = {
            name: Member(name, name, name, "127.0.0.1", store_port=mailbox[number][0], pid=0, rank=number)
            for number, name in enumerate(self._names)
        }
        self._bare_clients = {
            number: c10d.TCPStore("127.0.0.1", mailbox[number][1], None, False, timedelta(seconds=_SECONDS))
            for number in range(count)
        }
        self._links = self._new_links()

    def connect(self, variant: str, number: int) -> float:
        """Seconds that it took this survivor in round ``number``."""
        if variant == "unmet":
            self._links = self._new_links()
        self._barrier.wait()
        started = time.perf_counter()
        with ExitStack() as after:
            if variant == "bare":
                groups = self._connect_bare(f"bare/{number}")
                after.callback(groups.clear)
            else:
                self._links.enter(members=self._members, order=self._names, name=f"{variant}/{number}")
                self._links.connect(self._names)
                after.callback(self._links.close)
            seconds = time.perf_counter() - started
            self._barrier.wait()
        for thread in threading.enumerate():
            if thread.name == _BURIAL:  # gloo takes its time to go, which is nobody's pause
                thread.join()
        self._barrier.wait()
        return seconds

    def _new_links(self) -> Links:
        return Links(
            self._names[self._index],
            interruption=Interruption(),
            timeout_seconds=_SECONDS,
            device=torch.device("cpu"),
            secret=self._secret,
            own_store=self._server,
        )

    def _connect_bare(self, name: str) -> list[Any]:
        groups: list[Any] = []
        network = network_device()

        def build(peer: int) -> None:
            first, second = sorted((self._index, peer))
            store = c10d.PrefixStore(f"{name}/{first}/{second}", self._bare_clients[first])
            options = c10d.ProcessGroupGloo._Options()
            options._timeout = timedelta(seconds=_SECONDS)
            options._devices = [network]
            options._threads = 1
            groups.append(c10d.ProcessGroupGloo(store, int(self._index != first), 2, options))

        peers = [peer for peer in range(len(self._names)) if peer != self._index]
        threads = [threading.Thread(target=build, args=(peer,)) for peer in peers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return groups


def survive(index: int, arguments: argparse.Namespace, secret: str, mailbox: Any, barrier: Any, results: Any) -> None:
    """The life of one survivor."""
    torch.set_num_threads(1)
    survivor = Survivor(index, count=arguments.survivors, secret=secret, mailbox=mailbox, barrier=barrier)
    for number in range(_WARM_UP + arguments.rounds):
        for variant in VARIANTS:
            results.put((variant, number, survivor.connect(variant, number)))
    results.close()
    results.join_thread()
    barrier.wait()
    os._exit(0)  # threads of gloo may still be at work


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--survivors", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=100, help="of each kind (default: 100)")
    arguments = parser.parse_args(argv)
    context = multiprocessing.get_context("fork")
    with context.Manager() as manager:
        mailbox, barrier, results = manager.dict(), context.Barrier(arguments.survivors), context.Queue()
        secret = secrets.token_hex(32)
        processes = [
            context.Process(target=survive, args=(index, arguments, secret, mailbox, barrier, results), daemon=True)
            for index in range(arguments.survivors)
        ]
        for process in processes:
            process.start()
        slowest: dict[tuple[str, int], float] = {}
        for _ in range(arguments.survivors * len(VARIANTS) * (_WARM_UP + arguments.rounds)):
            variant, number, seconds = results.get(timeout=2 * _SECONDS)
            slowest[variant, number] = max(seconds, slowest.get((variant, number), 0.0))
        for process in processes:
            process.join(_SECONDS)
    for variant in VARIANTS:
        times = [1e3 * seconds for (kind, number), seconds in slowest.items() if kind == variant and number >= _WARM_UP]
        low, median, high = statistics.quantiles(times, n=4)
        print(f"{variant:6} {median:6.2f} ms   ({low:.2f} to {high:.2f})")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
