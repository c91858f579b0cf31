"""How other commands on the same machine find a job's own etcd.

A file in the etcd's own folder says so: that belongs to one user, is closed to all others, and goes with
the etcd in whatever way its owner ends (see ``server_keeper.py``), so there are no files of dead jobs.
"""

from __future__ import annotations

import json
import os
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from deepspeed_bamboo.coordination.errors import ServerStartError

ROOM = "free about 100 MB there, point TMPDIR to a place with room, or name a running etcd in coordinator.endpoints"
FOLDER_PREFIX = "bamboo-etcd-"
_FILE_PREFIX = "job-"
_LIMIT_BYTES = 10_000


@dataclass(frozen=True)
class PublishedJob:
    """A job, its secret, its etcd, and the process (``owner_pid``, in ``pid_namespace``) that keeps it.

    ``address``: where the job's first machine is found by its others.
    """

    job: str
    prefix: str
    endpoint: str
    owner_pid: int
    pid_namespace: str
    secret: str = field(default="", repr=False)
    address: str = "127.0.0.1"

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> PublishedJob:
        return cls(**value)

    @property
    def same_namespace(self) -> bool:
        """Whether ``owner_pid`` means that process here, too."""
        return self.pid_namespace == own_pid_namespace()


def publish(folder: Path, job: PublishedJob) -> None:
    """Write ``job`` into the folder of its etcd, readable by its user only; nobody ever reads half of it.

    Raises ServerStartError where that is impossible.
    """
    file = folder / f"{_FILE_PREFIX}{job.job}"
    temporary = folder / f".{file.name}"
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "w", encoding="utf-8") as stream:  # noqa: PTH123 (a descriptor has no path)
            json.dump(asdict(job), stream)
        temporary.replace(file)
    except OSError as error:
        raise ServerStartError(f"{file} can't be written ({error.strerror}); {ROOM}") from error


def published_jobs(name: str | None = None) -> list[PublishedJob]:
    """The jobs of this user on this machine that have an etcd of their own; those called ``name`` if given."""
    found = []
    for folder in sorted(Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*")):
        if not _is_private(folder):
            continue
        for file in sorted(folder.glob(f"{_FILE_PREFIX}*")):
            job = _read(file)
            if job is not None and name in (None, job.job):
                found.append(job)
    return found


def own_pid_namespace() -> str:
    """Process numbers mean something only inside one pid namespace (one container)."""
    return str(Path("/proc/self/ns/pid").stat().st_ino)


def _read(file: Path) -> PublishedJob | None:
    """What ``file`` says; None when it has gone or makes no sense."""
    try:
        with file.open(encoding="utf-8") as stream:
            return PublishedJob.from_json(json.loads(stream.read(_LIMIT_BYTES)))
    except (OSError, ValueError, TypeError):
        return None


def _is_private(folder: Path) -> bool:
    """Whether nobody else can have put something there."""
    try:
        state = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(state.st_mode) and state.st_uid == os.getuid() and not stat.S_IMODE(state.st_mode) & 0o077
