"""An etcd that the test itself stops, starts, freezes and empties; its address stays the same."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

from deepspeed_bamboo.coordination.endpoints import Endpoint
from deepspeed_bamboo.coordination.errors import CoordinatorUnavailable
from deepspeed_bamboo.coordination.etcd import EtcdStore
from deepspeed_bamboo.coordination.server import find_etcd, free_port


class ManualEtcd:
    def __init__(self, folder: Path) -> None:
        self.endpoint = Endpoint("127.0.0.1", free_port("127.0.0.1"))
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start on the data there is and wait until it answers."""
        url, peer = f"http://{self.endpoint}", "unix://peer:1"
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    find_etcd(),
                    f"--data-dir={self._folder / 'data'}",
                    "--name=manual",
                    f"--listen-client-urls={url}",
                    f"--advertise-client-urls={url}",
                    f"--listen-peer-urls={peer}",
                    f"--initial-advertise-peer-urls={peer}",
                    f"--initial-cluster=manual={peer}",
                    "--heartbeat-interval=50",
                    "--election-timeout=500",
                    "--unsafe-no-fsync",
                    "--log-level=warn",
                ],
                cwd=self._folder,
                stdout=log,
                stderr=log,
            )
        probe = EtcdStore([self.endpoint])
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
        os.kill(self._process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGCONT)
