"""The first message of rank 0 to the other slots: where the coordinator is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from deepspeed_bamboo.elastic.errors import RefusedError
from deepspeed_bamboo.elastic.outcome import REFUSED
from deepspeed_bamboo.errors import MessageError

_REFUSAL = "refused"


@dataclass(frozen=True)
class Boot:
    """The job's name, coordinator, and the address where its workers first meet.

    ``master_ports`` holds one port for each attempt to start: workers of different attempts never meet.
    ``host_pid`` is the process on rank 0's machine that runs the job's own etcd; 0 for the user's etcd.
    ``ranks``: for a command that joins a running job, the rank in that job of each of its slots.
    ``secret`` is the job's; ``salt``, which is public, is what those who have the key make it of, on several machines.
    ``certificate`` (PEM) is that of the way to the job's own etcd, on several machines, and all that is trusted there.
    ``pipelines``: how many pipelines a job that starts has, where that is known.
    """

    job: str
    prefix: str
    endpoints: tuple[str, ...]
    master_addr: str
    master_ports: tuple[int, ...]
    host_pid: int = 0
    ranks: tuple[int, ...] = ()
    salt: str = ""
    secret: str = field(default="", repr=False)
    pipelines: int | None = None
    certificate: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Boot:
        """Inverse of :meth:`to_json`. Raises MessageError for anything else."""
        try:
            lists = {name: tuple(value[name]) for name in ("endpoints", "master_ports", "ranks")}
            boot = cls(**{**value, **lists})
        except (TypeError, KeyError) as error:
            raise MessageError(f"the message of rank 0 does not describe a job ({error})") from error
        numbers = (boot.host_pid, *boot.master_ports, *boot.ranks)
        texts = (boot.job, boot.prefix, boot.master_addr, boot.salt, boot.secret, boot.certificate, *boot.endpoints)
        if not all(type(number) is int for number in numbers) or not all(type(text) is str for text in texts):
            raise MessageError("the message of rank 0 has numbers where texts belong, or texts where numbers belong")
        return boot


class Exchange(Protocol):
    """How this message travels. Rank 0 gives or refuses once; every other slot takes once."""

    def give(self, boot: Boot) -> None:
        """Make ``boot`` available to the other slots until :meth:`close`."""

    def refuse(self, how: str = REFUSED) -> None:
        """Tell the other slots that there will be no job, if that is possible, and ``how`` rank 0 ends.

        Rank 0 itself says why.
        """

    def take(self, *, within_seconds: float) -> Boot:
        """What rank 0 gave. Raises ExchangeError when nothing came in time or rank 0 refused."""

    def close(self) -> None:
        """Remove whatever was used; for rank 0 once all slots have taken, or at the end."""


def pack(boot: Boot) -> bytes:
    """``boot`` as one line."""
    return json.dumps(boot.to_json()).encode() + b"\n"


def pack_refusal(how: str) -> bytes:
    """That there is no job, as one line."""
    return json.dumps({_REFUSAL: how}).encode() + b"\n"


def unpack(line: bytes) -> Boot:
    """Inverse of :func:`pack`. Raises RefusedError for :func:`pack_refusal`'s, and MessageError for anything else."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise MessageError(f"the message of rank 0 is no JSON ({error})") from error
    if not isinstance(value, dict):
        raise MessageError(f"the message of rank 0 is a {type(value).__name__}, and describes no job")
    if _REFUSAL in value:
        raise RefusedError("rank 0 could not start the job; its output says why", how=str(value[_REFUSAL]))
    return Boot.from_json(value)
