"""Keeps one private etcd running for its owner, and leaves nothing behind when the owner is gone.

Run as a file, never imported: ``python -I -S server_keeper.py SOCKET_FD OWNER_PID DIRECTORY COMMAND...``.
Standard library only, so that it starts in milliseconds.

It detaches into a session of its own, because whoever ends the owner's process tree or its terminal
must not take the coordinator away before the owner has told the others. It ends, with SIGKILL for
etcd and the directory removed, when the owner's process ends in any way or closes its end of the
socket. Over the socket it sends one JSON line for each thing that happens to etcd. An etcd that dies
is started again on the same data; one that keeps dying at once is given up.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time

PR_SET_PDEATHSIG = 1
QUICK_DEATH_SECONDS = 2.0
QUICK_DEATHS = 3


def die_with_parent() -> None:
    """For the child between fork and exec: be killed when the parent dies."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def detach() -> None:
    """Become a process without parent, terminal or open standard streams."""
    if os.fork() > 0:
        os._exit(0)
    os.setsid()
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)


def start_etcd(command: list[str], directory: str) -> subprocess.Popen[bytes]:
    """Start etcd in ``directory``, its output appended to ``output`` there."""
    descriptor = os.open(os.path.join(directory, "output"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)  # noqa: PTH118
    try:
        return subprocess.Popen(
            command,
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=descriptor,
            stderr=descriptor,
            preexec_fn=die_with_parent,
            restore_signals=True,
        )
    finally:
        os.close(descriptor)


def keep(channel: socket.socket, owner: int, directory: str, command: list[str]) -> None:
    """Run etcd until the owner is gone or says stop, or until it has died at once too often."""
    told = channel.fileno()
    quick_deaths = 0
    while quick_deaths < QUICK_DEATHS:
        etcd = start_etcd(command, directory)
        tell(channel, {"event": "started", "pid": etcd.pid})
        started = time.monotonic()
        etcd_descriptor = os.pidfd_open(etcd.pid)
        try:
            ready, _, _ = select.select([told, owner, etcd_descriptor], [], [])
        finally:
            os.close(etcd_descriptor)
        if told in ready or owner in ready:
            etcd.kill()
            etcd.wait()
            return
        tell(channel, {"event": "died", "code": etcd.wait()})
        quick_deaths = quick_deaths + 1 if time.monotonic() - started < QUICK_DEATH_SECONDS else 0
    tell(channel, {"event": "given up"})
    select.select([told, owner], [], [])


def tell(channel: socket.socket, message: dict[str, object]) -> None:
    """Send one line; an owner that has gone meanwhile is noticed by the next select."""
    with contextlib.suppress(OSError):
        channel.sendall(json.dumps(message).encode() + b"\n")


def main(arguments: list[str]) -> None:
    descriptor, owner_pid, directory, *command = arguments
    channel = socket.socket(fileno=int(descriptor))
    detach()
    os.environ.clear()  # ETCD_* variables of the user's own cluster would override the command line
    try:
        owner = os.pidfd_open(int(owner_pid))
        keep(channel, owner, directory, command)
    except ProcessLookupError:
        return  # the owner is gone already
    finally:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1:])
