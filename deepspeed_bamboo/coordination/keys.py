"""The names of a job's keys. Only this module knows them; ``values.py`` knows the values."""

from __future__ import annotations

import re

from deepspeed_bamboo.coordination.errors import EndpointError
from deepspeed_bamboo.coordination.records import Change
from deepspeed_bamboo.coordination.values import decode_as, member_of

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def check_name(name: str, *, what: str) -> str:
    """``name`` if it can be part of a key. Raises EndpointError with value and rule otherwise."""
    if not _NAME.fullmatch(name):
        raise EndpointError(
            f"{what} {name!r} must be 1 to 128 letters, digits, '.', '_' or '-', beginning with a letter or digit"
        )
    return name


def jobs_root(prefix: str) -> str:
    """Below which the keys of all jobs under ``prefix`` are."""
    return f"/{prefix.strip('/')}/.jobs/"


class JobKeys:
    """``<prefix>/.jobs/<job>/<kind>[/<epoch>][/<worker or node>[/<reporter>]]``

    No part of a prefix begins with a dot (``config.section``). So no key of one job is below that of another, not even
    where one's prefix is the other's prefix and name.
    """

    def __init__(self, *, prefix: str, job: str) -> None:
        self.root = f"{jobs_root(prefix)}{check_name(job, what='job name')}/"
        # Beside the root, so that nobody who watches the job hears of every step.
        self.status = f"/{prefix.strip('/')}/.status/{job}"
        self.all_past = f"/{prefix.strip('/')}/.past/{job}/"
        self.events = f"/{prefix.strip('/')}/.events/{job}"
        # Nor of every report: one worker looks for them, and tells the others what all have said.
        self.all_reports = f"/{prefix.strip('/')}/.reports/{job}/"
        # Nor of what is long.
        self.all_long = f"/{prefix.strip('/')}/.long/{job}/"
        self.last_end = f"/{prefix.strip('/')}/.ended/{job}"
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
        # Nor of how far long work is, for onlookers.
        self.all_works = f"/{prefix.strip('/')}/.works/{job}/"

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

    def work(self, worker: str) -> str:
        return self.all_works + check_name(worker, what="worker id")

    def all_progress(self, epoch: int) -> str:
        return f"{self.root}progress/{epoch}/"

    def progress(self, epoch: int, worker: str) -> str:
        return self.all_progress(epoch) + check_name(worker, what="worker id")

    def reports(self, epoch: int) -> str:
        return f"{self.all_reports}{epoch}/"

    def report(self, epoch: int, worker: str) -> str:
        return self.reports(epoch) + check_name(worker, what="worker id")

    def long_values(self, epoch: int) -> str:
        return f"{self.all_long}{epoch}/"

    def long_value(self, epoch: int, name: str, piece: int) -> str:
        return f"{self.long_values(epoch)}{name}/{piece}"

    def all_suspicions(self, epoch: int) -> str:
        return f"{self.root}suspicion/{epoch}/"

    def suspicion(self, epoch: int, *, suspect: str, reporter: str) -> str:
        return f"{self.all_suspicions(epoch)}{check_name(suspect, what='worker id')}/{reporter}"

    def change(self, key: str, value: str | None) -> Change | None:
        """What a new ``value`` of ``key`` (None: removed) means; None for a key that means nothing here.

        Raises OddValueError for a value that is none of its kind.
        """
        kind, *parts = key.removeprefix(self.root).split("/")
        if not _is_known(kind, parts):
            return None
        decoded = None if value is None else decode_as(kind, value)
        if kind == "epoch":
            return Change("epoch", epoch=decoded.number if decoded else -1, value=decoded)
        if kind == "member" and decoded is not None:
            decoded = member_of(decoded)
        if kind in ("progress", "suspicion"):
            return Change(kind, epoch=int(parts[0]), worker=parts[1], value=decoded)  # type: ignore[arg-type]
        return Change(kind, worker=parts[0] if parts else "", value=decoded)  # type: ignore[arg-type]


# How many parts a key of each kind has behind the kind.
_PARTS = {
    "epoch": 0,
    "failure": 0,
    "finished": 0,
    "generation": 0,
    "stop": 0,
    "member": 1,
    "ended": 1,
    "agent": 1,
    "drain": 1,
    "hang": 1,
    "progress": 2,
    "suspicion": 3,
}
_NUMBERED = ("agent", "progress", "suspicion")  # whose first part is a rank or an epoch


def _is_known(kind: str, parts: list[str]) -> bool:
    """Whether a key is one that watchers are told of."""
    if _PARTS.get(kind) != len(parts):
        return False
    return kind not in _NUMBERED or (parts[0].isascii() and parts[0].isdigit())
