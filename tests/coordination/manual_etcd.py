"""An etcd that the test itself stops, starts, freezes and empties; its address stays the same."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from deepspeed_bamboo.coordination.endpoints import Endpoint
from deepspeed_bamboo.coordination.errors import CoordinatorUnavailable
from deepspeed_bamboo.coordination.etcd import EtcdStore
from deepspeed_bamboo.coordination.guard import EtcdGuard
from deepspeed_bamboo.coordination.server import find_etcd, free_port
from tests.coordination.helpers import freeze


class ManualEtcd:
    """A server of its own, or the member ``number`` of a cluster whose members' peer ports are ``peer_ports``.

    ``options`` come on top of the command line; ``guard`` is how a client reaches it then.
    """

    def __init__(
        self,
        folder: Path,
        *,
        peer_ports: Sequence[int] = (),
        number: int = 0,
        options: Sequence[str] = (),
        guard: EtcdGuard | None = None,
    ) -> None:
        self._options = tuple(options)
        self._guard = guard
        self.endpoint = Endpoint("127.0.0.1", free_port("127.0.0.1"))
        self._folder = folder
        folder.mkdir(exist_ok=True)
        peers = [f"http://127.0.0.1:{port}" for port in peer_ports] or ["unix://peer:1"]
        self._name, self._peer = f"manual{number}", peers[number]
        self._cluster = ",".join(f"manual{other}={peer}" for other, peer in enumerate(peers))
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start on the data there is and wait until it answers."""
        self.launch()
        self.wait_until_ready()

    def launch(self) -> None:
        """Start, without waiting."""
        url = f"{'https' if self._guard and self._guard.ca_cert else 'http'}://{self.endpoint}"
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    find_etcd(),
                    f"--data-dir={self._folder / 'data'}",
                    f"--name={self._name}",
                    f"--listen-client-urls={url}",
                    f"--advertise-client-urls={url}",
                    f"--listen-peer-urls={self._peer}",
                    f"--initial-advertise-peer-urls={self._peer}",
                    f"--initial-cluster={self._cluster}",
                    "--heartbeat-interval=50",
                    "--election-timeout=500",
                    "--unsafe-no-fsync",
                    "--log-level=warn",
                    *self._options,
                ],
                cwd=self._folder,
                stdout=log,
                stderr=log,
            )

    def wait_until_ready(self) -> None:
        """Return once this server answers, which needs a majority of its cluster."""
        probe = EtcdStore([self.endpoint], guard=self._guard)
        try:
            probe.ping(within_seconds=10)
        except CoordinatorUnavailable:
            print((self._folder / "log").read_text())
            raise
        finally:
            probe.close()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def wipe(self) -> None:
        """Lose all data (the server must not be running)."""
        shutil.rmtree(self._folder / "data")

    def freeze(self) -> None:
        assert self._process is not None
        freeze(self._process.pid)

    def thaw(self) -> None:
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGCONT)
