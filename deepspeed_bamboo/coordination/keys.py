"""The names of a job's keys, and how their values are written. Nothing else knows either."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from deepspeed_bamboo.coordination.errors import EndpointError
from deepspeed_bamboo.coordination.records import AgentRecord, Change, Drain, EpochRecord, JobFailure, Member
from deepspeed_bamboo.coordination.shared_registration import LEASE

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")

# A member's value carries its generation and its lease as well, which are nobody's business outside of this part.
GENERATION = "generation"

_DECODERS: dict[str, Callable[[Any], Any]] = {
    "epoch": EpochRecord.from_json,
    "member": lambda value: member_of(value),
    "agent": AgentRecord.from_json,
    "failure": JobFailure.from_json,
    "drain": Drain.from_json,
    "stop": lambda value: stop_reason(value),
}


def check_name(name: str, *, what: str) -> str:
    """``name`` if it can be part of a key. Raises EndpointError with value and rule otherwise."""
    if not _NAME.fullmatch(name):
        raise EndpointError(
            f"{what} {name!r} must be 1 to 128 letters, digits, '.', '_' or '-', beginning with a letter or digit"
        )
    return name


class JobKeys:
    """``<prefix>/<job>/<kind>[/<epoch>][/<worker or node>[/<reporter>]]``"""

    def __init__(self, *, prefix: str, job: str) -> None:
        self.root = f"/{prefix.strip('/')}/{check_name(job, what='job name')}/"
        # Beside the root, so that nobody who watches the job hears of every step.
        self.status = f"/{prefix.strip('/')}/.status/{job}"
        # Nor of every report: one worker looks for them, and tells the others what all have said.
        self.all_reports = f"/{prefix.strip('/')}/.reports/{job}/"
        self.claim = f"/{prefix.strip('/')}/.claims/{job}"  # no job's name begins with a dot
        self.epoch = self.root + "epoch"
        self.generation = self.root + "generation"
        self.failure = self.root + "failure"
        self.finished = self.root + "finished"
        self.started = self.root + "started"
        self.stop = self.root + "stop"
        self.facts = self.root + "facts"
        self.next_rank = self.root + "next_rank"
        self.members = self.root + "member/"
        self.agents = self.root + "agent/"
        self.all_ended = self.root + "ended/"
        self.drains = self.root + "drain/"
        self.hangs = self.root + "hang/"
        # Nor of where workers wait: only one that waits itself looks.
        self.all_whereabouts = f"/{prefix.strip('/')}/.whereabouts/{job}/"

    def member(self, worker: str) -> str:
        return self.members + check_name(worker, what="worker id")

    def agent(self, rank: int) -> str:
        return f"{self.agents}{rank}"

    def ended(self, worker: str) -> str:
        return self.all_ended + check_name(worker, what="worker id")

    def drain(self, node: str) -> str:
        return self.drains + check_name(node, what="node name")

    def hang(self, worker: str) -> str:
        return self.hangs + check_name(worker, what="worker id")

    def fault(self, name: str) -> str:
        return f"{self.root}fault/{check_name(name, what='fault')}"

    def whereabouts(self, worker: str) -> str:
        return self.all_whereabouts + check_name(worker, what="worker id")

    def all_progress(self, epoch: int) -> str:
        return f"{self.root}progress/{epoch}/"

    def progress(self, epoch: int, worker: str) -> str:
        return self.all_progress(epoch) + check_name(worker, what="worker id")

    def reports(self, epoch: int) -> str:
        return f"{self.all_reports}{epoch}/"

    def report(self, epoch: int, worker: str) -> str:
        return self.reports(epoch) + check_name(worker, what="worker id")

    def all_suspicions(self, epoch: int) -> str:
        return f"{self.root}suspicion/{epoch}/"

    def suspicion(self, epoch: int, *, suspect: str, reporter: str) -> str:
        return f"{self.all_suspicions(epoch)}{check_name(suspect, what='worker id')}/{reporter}"

    def change(self, key: str, value: str | None) -> Change | None:
        """What a new ``value`` of ``key`` (None: removed) means; None for a key that means nothing here."""
        kind, *parts = key.removeprefix(self.root).split("/")
        decoded = None if value is None else _DECODERS.get(kind, _as_is)(decode(value))
        if kind in ("failure", "finished", "generation", "stop") and not parts:
            return Change(kind, value=decoded)  # type: ignore[arg-type]
        if kind == "epoch" and not parts:
            return Change("epoch", epoch=decoded.number if decoded else -1, value=decoded)
        if kind in ("member", "ended", "agent", "drain", "hang") and len(parts) == 1:
            return Change(kind, worker=parts[0], value=decoded)  # type: ignore[arg-type]
        if kind == "progress" and len(parts) == 2:
            return Change("progress", epoch=int(parts[0]), worker=parts[1], value=decoded)
        if kind == "suspicion" and len(parts) == 3:
            return Change("suspicion", epoch=int(parts[0]), worker=parts[1], value=decoded)
        return None


def member_of(value: dict[str, Any]) -> Member:
    """The member that a value of its key describes."""
    return Member.from_json({name: field for name, field in value.items() if name not in (GENERATION, LEASE)})


def member_text(member: Member, *, generation: int) -> str:
    """Inverse of :func:`member_of`, as a worker of ``generation`` writes it."""
    return encode({**member.to_json(), GENERATION: generation})


def stop_reason(value: dict[str, Any]) -> str:
    """Why the job is asked to end, from the value of that key."""
    return str(value["reason"])


def encode(value: Any) -> str:
    """Compact JSON."""
    return json.dumps(value, separators=(",", ":"))


def decode(text: str) -> Any:
    """Inverse of :func:`encode`."""
    return json.loads(text)


def _as_is(value: Any) -> Any:
    return value
