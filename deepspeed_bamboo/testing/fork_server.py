"""A process that has imported what is slow to import, and forks ready-made children on request.

For tests and fault sweeps: importing torch and deepspeed takes seconds, a fork milliseconds. (The
forkserver of ``multiprocessing`` cannot be shared by the children it made, and does not end a child
with the process that asked for it.) Linux only.

Protocol, over a Unix socket, one JSON line each way: a client connects and sends a request
(:class:`ForkRequest`); the answer is ``{"pid": n}``, and when the child has ended ``{"exit": code}``,
negative for a signal. A client that disconnects before has its child killed. The server ends, and
kills every child, when the process that started it ends.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from deepspeed_bamboo.elastic.errors import LaunchError

_START_SECONDS = 120.0
_FORK_SECONDS = 30.0


@dataclass(frozen=True)
class ForkRequest:
    """Call ``target`` (``module:function``) with ``arguments`` in a child.

    ``environment`` comes on top of the server's. ``output`` is the file that standard output and error
    are appended to; empty: the server's own.
    """

    target: str
    arguments: tuple[Any, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    output: str = ""


class ForkedProcess:
    """A child, as seen by whoever asked for it."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._unread = b""
        self._code: int | None = None
        answer = self._read_line(within_seconds=_FORK_SECONDS)
        if answer is None:
            raise LaunchError("the fork server did not fork; look at its output")
        self.pid = int(answer["pid"])

    def exit_code(self, *, within_seconds: float) -> int | None:
        """The exit code, negative for a signal; None when the child still runs after that time."""
        if self._code is None:
            answer = self._read_line(within_seconds=within_seconds)
            if answer is not None:
                self._code = int(answer["exit"])
                self._connection.close()
        return self._code

    def signal(self, number: int) -> None:
        """Send ``number`` to the child; nothing happens when it has ended."""
        with contextlib.suppress(ProcessLookupError):
            if self._code is None:
                os.kill(self.pid, number)

    def abandon(self) -> None:
        """Have the child killed if it still runs, and forget about it."""
        self._connection.close()

    def _read_line(self, *, within_seconds: float) -> dict[str, Any] | None:
        deadline = time.monotonic() + within_seconds
        while b"\n" not in self._unread:
            self._connection.settimeout(max(0.0, deadline - time.monotonic()))
            try:
                data = self._connection.recv(4096)
            except (BlockingIOError, TimeoutError):
                return None
            if not data:
                self._code = -int(signal.SIGKILL)  # the server is gone, and its children with it
                return {"exit": self._code} if hasattr(self, "pid") else None
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        return dict(json.loads(line))


class ForkServer:
    """Starts a server with ``preload`` imported, and asks it for children. Use as a context manager."""

    def __init__(self, preload: Sequence[str] = ()) -> None:
        """Returns once everything is imported. Raises LaunchError when that fails."""
        self._folder = tempfile.TemporaryDirectory(prefix="bamboo-fork-")
        self.address = str(Path(self._folder.name) / "socket")
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno()), self.address, json.dumps(sys.path), *preload],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        self._lifeline = ours
        ours.settimeout(_START_SECONDS)
        if ours.recv(1) != b"r":
            self.close()
            raise LaunchError(f"the fork server could not import {', '.join(preload)}; see its message above")

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def fork(self, request: ForkRequest) -> ForkedProcess:
        """A new child."""
        return fork(self.address, request)

    def close(self) -> None:
        """End the server and kill its children."""
        self._lifeline.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._folder.cleanup()


def fork(address: str, request: ForkRequest) -> ForkedProcess:
    """Ask the server at ``address`` for a child; possible from any process of the same user."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    connection.sendall(json.dumps(asdict(request)).encode() + b"\n")
    return ForkedProcess(connection)


def reference(function: Callable[..., Any]) -> str:
    """``module:function`` for a function that another process can import. Raises LaunchError otherwise."""
    module, name = function.__module__, function.__qualname__
    if module == "__main__" or "<" in name or "." in name:
        raise LaunchError(
            f"{module}.{name} cannot be called in another process; define it at the top level of a module with a name"
        )
    return f"{module}:{name}"


class _Server:
    """The loop of the server process. Single-threaded, so that forking is safe."""

    def __init__(self, lifeline: socket.socket, listener: socket.socket) -> None:
        self._lifeline = lifeline
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._children: dict[int, tuple[int, socket.socket]] = {}  # pid -> (its pidfd, its client)

    def run(self) -> None:
        self._selector.register(self._lifeline, selectors.EVENT_READ, self._end)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._lifeline.sendall(b"r")
        while True:
            for key, _ in self._selector.select():
                if self._is_registered(key.fileobj):
                    key.data()

    def _is_registered(self, file: Any) -> bool:
        """Not any more, if an earlier event of the same round has closed it."""
        try:
            self._selector.get_key(file)
        except (KeyError, ValueError):
            return False
        return True

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        request = _receive(client)
        if request is None:
            client.close()
            return
        with contextlib.suppress(OSError):
            pid = os.fork()
            if pid == 0:
                self._become(request, client)
            pidfd = os.pidfd_open(pid)
            self._children[pid] = (pidfd, client)
            self._selector.register(pidfd, selectors.EVENT_READ, lambda: self._collect(pid))
            self._selector.register(client, selectors.EVENT_READ, lambda: self._abandon(pid))
            client.sendall(json.dumps({"pid": pid}).encode() + b"\n")

    def _collect(self, pid: int) -> None:
        """The child has ended: tell its client."""
        pidfd, client = self._children.pop(pid)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(client)
        with client, contextlib.suppress(OSError):
            client.sendall(json.dumps({"exit": code}).encode() + b"\n")

    def _abandon(self, pid: int) -> None:
        """The client is gone: so is its child, with whatever that has started."""
        _, client = self._children[pid]
        self._selector.unregister(client)
        _kill_group(pid)

    def _end(self) -> None:
        for pid in self._children:
            _kill_group(pid)
        for pid in self._children:
            os.waitpid(pid, 0)
        shutil.rmtree(Path(self._listener.getsockname()).parent, ignore_errors=True)
        os._exit(0)

    def _become(self, request: ForkRequest, client: socket.socket) -> None:
        """In the child: be what was asked for. Never returns."""
        code = 1
        try:
            self._selector.close()
            self._listener.close()
            self._lifeline.close()
            client.close()
            for pidfd, other in self._children.values():
                os.close(pidfd)
                other.close()
            code = _run_request(request)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


def _kill_group(leader: int) -> None:
    """Kill a child and its process group, of which it is the leader unless it was forked a moment ago."""
    os.kill(leader, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def _receive(client: socket.socket) -> ForkRequest | None:
    """What ``client`` asks for; None when it is gone or its request makes no sense."""
    client.settimeout(_FORK_SECONDS)
    try:
        return ForkRequest(**json.loads(client.makefile("rb").readline()))
    except (OSError, ValueError, TypeError):
        return None


def _run_request(request: ForkRequest) -> int:
    # Imported here: this is the child's business, and the server imports nothing that it need not.
    from deepspeed_bamboo.elastic.bootstrap import guarded, run_exit_handlers
    from deepspeed_bamboo.elastic.orphans import die_with_parent

    die_with_parent()
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    if request.output:
        descriptor = os.open(request.output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.close(descriptor)
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        sys.stderr.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.environ.update(request.environment)
    module, _, name = request.target.partition(":")
    results: list[object] = []
    code = guarded(lambda: results.append(getattr(importlib.import_module(module), name)(*request.arguments)))
    run_exit_handlers()
    return code or (results[0] if results and isinstance(results[0], int) else 0)


def keep_finalizers_to_this_process() -> None:
    """No child runs at its end what there is to clean up by now: torch's takes it 0.06 seconds of a core."""
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False


def serve(arguments: Sequence[str]) -> None:
    """The server process: import, then fork on request until the lifeline breaks."""
    descriptor, address, path, *preload = arguments
    sys.path[:] = json.loads(path)
    gc.disable()  # what is imported stays, and looking through it again and again takes a second
    for module in preload:
        importlib.import_module(module)
    keep_finalizers_to_this_process()
    gc.collect()
    gc.freeze()
    gc.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(64)
        _Server(socket.socket(fileno=int(descriptor)), listener).run()


if __name__ == "__main__":
    serve(sys.argv[1:])
