"""What rank 0 tells the other slots before anything can be coordinated: where the coordinator is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from deepspeed_bamboo.elastic.errors import RefusedError


@dataclass(frozen=True)
class Boot:
    """The job's name, coordinator, and the address where its workers first meet.

    ``master_ports`` holds one port for each attempt to start: workers of different attempts never meet.
    ``host_pid`` is the process on rank 0's machine that runs the job's own etcd; 0 for the user's etcd.
    ``ranks``: for a command that joins a running job, the rank in that job of each of its slots.
    """

    job: str
    prefix: str
    endpoints: tuple[str, ...]
    master_addr: str
    master_ports: tuple[int, ...]
    host_pid: int = 0
    ranks: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Boot:
        lists = ("endpoints", "master_ports", "ranks")
        fields: dict[str, Any] = {name: tuple(part) if name in lists else part for name, part in value.items()}
        return cls(**fields)


class Exchange(Protocol):
    """How the news travel. Rank 0 gives or refuses once; every other slot takes once."""

    def give(self, boot: Boot) -> None:
        """Make ``boot`` available to the other slots until :meth:`close`."""

    def refuse(self) -> None:
        """Let the other slots know that there will be none, if that is possible; rank 0 says why itself."""

    def take(self, *, within_seconds: float) -> Boot:
        """What rank 0 gave. Raises ExchangeError when nothing came in time or rank 0 refused."""

    def close(self) -> None:
        """Remove whatever was used; for rank 0 once all slots have taken, or at the end."""


def pack(boot: Boot | None) -> bytes:
    """``boot`` (None: refused) as one line."""
    return json.dumps(None if boot is None else boot.to_json()).encode() + b"\n"


def unpack(line: bytes) -> Boot:
    """Inverse of :func:`pack`. Raises RefusedError for a refusal."""
    value = json.loads(line)
    if value is None:
        raise RefusedError("rank 0 could not start the job; its message says why")
    return Boot.from_json(value)
