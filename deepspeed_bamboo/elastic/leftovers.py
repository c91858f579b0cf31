"""What a killed process cannot remove itself."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from deepspeed_bamboo.elastic.processes import stat_fields

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
        except ProcessLookupError:
            continue
    return found
