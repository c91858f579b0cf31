"""The exchange on one machine: a private file named after the launcher that all slots have as parent."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
import time
from pathlib import Path

from deepspeed_bamboo.coordination.published import own_pid_namespace
from deepspeed_bamboo.elastic.boot import Boot, pack, pack_refusal, unpack
from deepspeed_bamboo.elastic.errors import LateError, LaunchError
from deepspeed_bamboo.elastic.outcome import REFUSED
from deepspeed_bamboo.elastic.processes import ProcessIdentity

_POLL_SECONDS = 0.005
_WRITE_ATTEMPTS = 10


class FileExchange:
    """Two jobs have two launchers, so they never share a file; a dead launcher's file is nobody's.

    The folder belongs to one user, readable by nobody else, and is there only while a file is in it.
    """

    def __init__(self, launcher_pid: int) -> None:
        """Raises LaunchError when there is no place for the folder, or it cannot be trusted."""
        launcher = ProcessIdentity.of(launcher_pid)
        if launcher is None:
            raise LateError(f"the launcher, process {launcher_pid}, is gone")
        self._launcher = launcher
        try:
            place = Path(tempfile.gettempdir())
        except OSError as error:
            raise LaunchError(f"{error}; point TMPDIR to a folder that you may write to") from error
        self._folder = place / f"deepspeed_bamboo-{os.getuid()}"
        self._file = self._folder / f"{own_pid_namespace()}-{launcher.pid}-{launcher.start_ticks}"

    def give(self, boot: Boot) -> None:
        try:
            self._write(pack(boot))
        except OSError as error:
            raise LaunchError(
                f"{self._folder} can't be written ({error.strerror}); free some space there, or point TMPDIR elsewhere"
            ) from error
        self._sweep()

    def refuse(self, how: str = REFUSED) -> None:
        with contextlib.suppress(OSError, LaunchError):
            self._write(pack_refusal(how))

    def take(self, *, within_seconds: float) -> Boot:
        deadline = time.monotonic() + within_seconds
        while time.monotonic() < deadline:
            try:
                self._check_folder()
                return unpack(self._file.read_bytes())
            except FileNotFoundError:
                time.sleep(_POLL_SECONDS)
            if not self._launcher.runs():
                raise LateError(f"the launcher, process {self._launcher.pid}, ended during the start")
        raise LateError(f"rank 0 did not start the job within {within_seconds:.0f} s; look at its output")

    def close(self) -> None:
        self._file.unlink(missing_ok=True)
        self._remove_folder()

    def _write(self, content: bytes) -> None:
        """Atomically, so that nobody reads half of it; again if another job just removed the empty folder."""
        for attempt in range(_WRITE_ATTEMPTS):
            with contextlib.suppress(FileExistsError):
                self._folder.mkdir(mode=0o700)
            try:
                self._check_folder()
                descriptor, name = tempfile.mkstemp(dir=self._folder, prefix=f".{self._file.name}-")
                with open(descriptor, "wb") as temporary:  # noqa: PTH123 (a descriptor has no path)
                    temporary.write(content)
                Path(name).replace(self._file)
                return
            except FileNotFoundError:
                if attempt == _WRITE_ATTEMPTS - 1:
                    raise

    def _check_folder(self) -> None:
        """Raises LaunchError unless the folder is this user's own and closed to others."""
        state = self._folder.lstat()
        if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.getuid() or stat.S_IMODE(state.st_mode) & 0o077:
            raise LaunchError(
                f"{self._folder} must be a folder of user {os.getuid()} with mode 700; "
                f"remove it, or point TMPDIR to another place"
            )

    def _sweep(self) -> None:
        """Remove the files of launchers that have ended."""
        for file in self._folder.glob("*-*-*"):
            namespace, pid, ticks = file.name.lstrip(".").split("-")[:3]
            if namespace == own_pid_namespace() and pid.isdigit() and not ProcessIdentity(int(pid), int(ticks)).runs():
                file.unlink(missing_ok=True)

    def _remove_folder(self) -> None:
        with contextlib.suppress(OSError):  # it is not empty: another job is about to start
            self._folder.rmdir()
