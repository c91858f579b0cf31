"""What a killed process cannot remove itself."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from deepspeed_bamboo.elastic.processes import ProcessIdentity, stat_fields

_SHARED_MEMORY = Path("/dev/shm")


def remove_shared_memory(*, worker_pid: int, rank: int, master_addr: str, master_port: int) -> list[str]:
    """Unlink the shared-memory files of a worker that has ended; returns their names.

    Those of torch (named after the process) and of DeepSpeed's CPU collectives (named after the job's
    own master address and port). Others that map them still keep their memory until they end.
    """
    deepspeed = f"deepspeed_allreduce_buffer_{os.getuid()}_{master_addr}_{master_port}_{rank}"
    found = [*_SHARED_MEMORY.glob(f"torch_{worker_pid}_*"), *_SHARED_MEMORY.glob(deepspeed)]
    for file in found:
        file.unlink(missing_ok=True)
    return [file.name for file in found]


def processes_of_session(session: int) -> list[int]:
    """The running processes of a session, for example those that a worker left: its data loaders."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            fields = stat_fields(int(folder.name))
            if fields is not None and int(fields[3]) == session and fields[0] != "Z":
                found.append(int(folder.name))
    return found


def signal_session(session: int, number: signal.Signals) -> list[int]:
    """Send ``number`` to every process of ``session``; returns which there were."""
    found = processes_of_session(session)
    for pid in found:
        try:
            os.kill(pid, number)
        except (ProcessLookupError, PermissionError):  # gone, or another user's: none of ours
            continue
    return found


class WorkerSessions:
    """The sessions that an agent's workers lead, and what is left in them. Each is called by its leader's process id.

    Linux gives a number again as soon as nobody has it, neither as process nor as session. Then a session of that
    number is somebody else's, so none is signalled of which nobody is left who was seen in it.
    """

    def __init__(self) -> None:
        self._pids: dict[str, int] = {}
        self._left: dict[str, tuple[ProcessIdentity, ...]] = {}  # of workers that have ended

    def begin(self, worker: str, pid: int) -> None:
        """``worker`` is process ``pid``, which leads its session."""
        self._pids[worker] = pid

    def pid(self, worker: str) -> int | None:
        """The process of ``worker``; None for one that was never started, or of whom nothing is left."""
        return self._pids.get(worker)

    def running(self, worker: str) -> int | None:
        """The process of ``worker`` if :meth:`end` has not been called for it: its number is nobody else's."""
        return None if worker in self._left else self._pids.get(worker)

    def end(self, worker: str, *, signalled: bool) -> None:
        """The process of ``worker`` has just ended. What it left is sent SIGTERM if ``signalled``, and remembered."""
        session = self._pids[worker]
        found = signal_session(session, signal.SIGTERM) if signalled else processes_of_session(session)
        left = tuple(one for one in map(ProcessIdentity.of, found) if one is not None)
        if left:
            self._left[worker] = left
        else:
            del self._pids[worker]

    def kill(self) -> None:
        """End all that is still in them."""
        for worker, session in self._pids.items():
            left = self._left.get(worker)
            if left is None or any(one.runs() for one in left):
                signal_session(session, signal.SIGKILL)
