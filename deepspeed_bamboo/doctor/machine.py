"""Facts about this machine. Tests replace them."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Protocol

import psutil

from deepspeed_bamboo.errors import ConfigError
from deepspeed_bamboo.trust.secret import read_key

_QUERY_SECONDS = 20.0
_MIB = 1 << 20
_UNSYNCHRONISED = 0x40  # STA_UNSYNC of Linux's timex.h
_TIMEX_BYTES, _STATUS_OFFSET = 208, 40  # of struct timex on 64-bit Linux


@dataclass(frozen=True)
class Gpu:
    """One GPU: the size of its memory, and how much is in use."""

    name: str
    memory_bytes: int
    used_bytes: int


class Machine(Protocol):
    """None where the machine doesn't say."""

    def python(self) -> tuple[int, ...]:
        """The version of Python."""

    def version(self, package: str) -> str | None:
        """The version of an installed package."""

    def gpus(self) -> tuple[Gpu, ...] | None:
        """The GPUs, none for a machine without; None where they can't be asked."""

    def interfaces(self) -> frozenset[str]:
        """The names of the network interfaces."""

    def addresses(self) -> frozenset[str]:
        """All own addresses."""

    def host_name(self) -> str:
        """What this machine calls itself."""

    def resolve(self, name: str) -> str | None:
        """The address of a host."""

    def port_is_free(self, port: int) -> bool:
        """Whether a server could listen there."""

    def shared_memory_bytes(self) -> int | None:
        """The size of /dev/shm."""

    def clock_is_synchronised(self) -> bool | None:
        """Whether something keeps the clock right."""

    def secret_problem(self, environment: Mapping[str, str]) -> str | None:
        """What is wrong with the file of the secret that machines share; None where nothing is, or there is no file."""

    def build_locks(self, environment: Mapping[str, str]) -> tuple[tuple[Path, float], ...]:
        """The locks of builds of torch extensions, and their age in seconds."""


class ThisMachine:
    """See :class:`Machine`."""

    def python(self) -> tuple[int, ...]:
        """See :class:`Machine`."""
        return tuple(sys.version_info[:3])

    def version(self, package: str) -> str | None:
        """See :class:`Machine`."""
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            return None

    def gpus(self) -> tuple[Gpu, ...] | None:
        """See :class:`Machine`."""
        program = shutil.which("nvidia-smi")
        if program is None:
            return ()
        query = [program, "--query-gpu=name,memory.total,memory.used", "--format=csv,noheader,nounits"]
        try:
            asked = subprocess.run(query, capture_output=True, text=True, timeout=_QUERY_SECONDS, check=True)
            rows = [line.rsplit(",", 2) for line in asked.stdout.splitlines() if line.strip()]
            return tuple(Gpu(name.strip(), int(total) * _MIB, int(used) * _MIB) for name, total, used in rows)
        except (OSError, subprocess.SubprocessError, ValueError):
            return None

    def interfaces(self) -> frozenset[str]:
        """See :class:`Machine`."""
        return frozenset(psutil.net_if_addrs())

    def addresses(self) -> frozenset[str]:
        """See :class:`Machine`."""
        return frozenset(known.address for found in psutil.net_if_addrs().values() for known in found)

    def host_name(self) -> str:
        """See :class:`Machine`."""
        return socket.gethostname()

    def resolve(self, name: str) -> str | None:
        """See :class:`Machine`."""
        try:
            return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
        except OSError:
            return None

    def port_is_free(self, port: int) -> bool:
        """See :class:`Machine`."""
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError:
                return False
        return True

    def shared_memory_bytes(self) -> int | None:
        """See :class:`Machine`."""
        try:
            found = os.statvfs("/dev/shm")
        except OSError:
            return None
        return found.f_frsize * found.f_blocks

    def clock_is_synchronised(self) -> bool | None:
        """See :class:`Machine`: what the kernel was told by whatever sets the clock."""
        state = ctypes.create_string_buffer(_TIMEX_BYTES)
        try:
            code = ctypes.CDLL(None).adjtimex(state)
        except (OSError, AttributeError):
            return None
        status = int.from_bytes(state.raw[_STATUS_OFFSET : _STATUS_OFFSET + 4], sys.byteorder)
        return None if code < 0 else not status & _UNSYNCHRONISED

    def secret_problem(self, environment: Mapping[str, str]) -> str | None:
        """See :class:`Machine`."""
        try:
            read_key(environment)
        except ConfigError as error:
            return str(error)
        return None

    def build_locks(self, environment: Mapping[str, str]) -> tuple[tuple[Path, float], ...]:
        """See :class:`Machine`. They are where torch.utils.cpp_extension has them.

        There are none where torch (2.14) holds a lock of the system, which ends with its build; the file stays.
        """
        if not _waits_for_files():
            return ()
        own = environment.get("TORCH_EXTENSIONS_DIR")
        caches = Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        found = Path(own).glob("*/lock") if own else (caches / "torch_extensions").glob("*/*/lock")
        locks = []
        for path in sorted(found):
            with contextlib.suppress(OSError):  # its build has just ended
                locks.append((path, time.time() - path.stat().st_mtime))
        return tuple(locks)


def _waits_for_files() -> bool:
    """Whether the torch that is installed, which is not imported, takes the presence of a file for a lock."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return False
    with contextlib.suppress(OSError):
        return "FileBaton(" in (Path(found.origin).parent / "utils" / "cpp_extension.py").read_text(encoding="utf-8")
    return True
