"""Network namespaces that stand for machines: what several of a job are, and what a stranger has. They need root."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

_NEW_NETWORK = 0x40000000


@contextmanager
def networks(count: int, *, subnet: str, reaches_here: bool = False) -> Iterator[list[str]]:
    """So many namespaces on one bridge, with addresses from ``subnet``.1 on; skips the test where there can't be any.

    They reach each other and nobody else; with ``reaches_here`` also this machine, which is ``subnet``.254 for them.
    """
    mark = f"{os.getpid()}-{subnet.rpartition('.')[2]}"
    names, bridge = [f"bamboo{mark}-{number}" for number in range(count)], f"bb{mark}"
    steps = [["ip", "link", "add", bridge, "type", "bridge"], ["ip", "link", "set", bridge, "up"]]
    if reaches_here:
        steps.append(["ip", "addr", "add", f"{subnet}.254/24", "dev", bridge])
    for number, name in enumerate(names):
        link = f"bb{mark}{number}"
        steps += [
            ["ip", "netns", "add", name],
            ["ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", name],
            ["ip", "link", "set", link, "master", bridge],
            ["ip", "link", "set", link, "up"],
            ["ip", "-n", name, "addr", "add", f"{subnet}.{number + 1}/24", "dev", "eth0"],
            ["ip", "-n", name, "link", "set", "eth0", "up"],
            ["ip", "-n", name, "link", "set", "lo", "up"],
        ]
    try:
        for step in steps:
            made = subprocess.run(step, capture_output=True, text=True, check=False)
            if made.returncode:
                pytest.skip(f"no network namespaces here: {made.stderr.strip()}")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", bridge], capture_output=True, check=False)


def enter_network(name: str) -> None:
    """Go into that network namespace, with this thread. Raises OSError."""
    with open(f"/run/netns/{name}") as file:  # noqa: PTH123
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _NEW_NETWORK):
            raise OSError(ctypes.get_errno(), "setns")
