"""The messages between the processes of a job, as values with a JSON form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from deepspeed_bamboo.core.placement import Placement, WorkerId

# stopped: as it was asked to, before it had begun to train.
FailureKind = Literal[
    "user_error",
    "fatal_loss",
    "slots_lost",
    "no_start",
    "no_coordinator",
    "no_machines",
    "interrupted",
    "stopped",
    "hang",
]
FINAL_FAILURES: frozenset[FailureKind] = frozenset({"user_error", "no_start", "stopped"})
"""After which the job's command is not repeated. After the others ``ds_bamboo run`` starts it again."""
ChangeKind = Literal[
    "epoch",
    "member",
    "agent",
    "ended",
    "progress",
    "suspicion",
    "generation",
    "drain",
    "stop",
    "failure",
    "finished",
    "hang",
    "resync",
]


@dataclass(frozen=True)
class Member:
    """A worker that takes part: where it runs and how its peers reach it.

    ``rank`` is the global rank that the launcher gave its slot; ``store_port`` is where it would host
    an epoch's store. ``joining``: it came to a running job, and waits to be admitted.
    ``home``: the rank that its script has in torch's default group when it begins.
    """

    worker: WorkerId
    node: str
    zone: str
    address: str
    store_port: int
    pid: int
    rank: int
    joining: bool = False
    home: int = -1

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Member:
        return cls(**value)


START = "start"
"""The reason of an epoch with which training begins."""


@dataclass(frozen=True)
class Roster:
    """The slots whose workers start anew together, in the order of their ranks in this start.

    ``generation``: of these workers. They meet at ``port`` of ``address``, the first one's machine. ``reached``: how
    many steps the job had complete, as far as their agents know.
    """

    slots: tuple[int, ...]
    generation: int
    address: str
    port: int
    reached: int

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "slots": list(self.slots)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Roster:
        """Inverse of :meth:`to_json`. Raises ValueError, KeyError or TypeError for anything else."""
        numbers = (*value["slots"], value["generation"], value["port"], value["reached"])
        if not all(type(number) is int for number in numbers) or not isinstance(value["address"], str):
            raise ValueError("numbers or an address")
        return cls(**{**value, "slots": tuple(value["slots"])})


@dataclass(frozen=True)
class EpochRecord:
    """One agreed membership and placement. ``lost`` are the workers that the epoch before still had.

    ``members`` are all workers that take part, standbys included. ``time_seconds`` is the proposer's
    wall clock, for people to read; nothing is decided by it.

    ``goes_back``: there are checkpoints, in workers' host memory or in a store, so that a loss of the last live copy of
    a stage need not end the job. ``restoring``: the number of the epoch from which on they are bringing the state back
    from one; -1 when they are not. The shadows of such an epoch are yet to be made.

    ``waits_seconds``: how long agents wait for machines where nobody is left who can train, to start workers anew from
    the store; 0: the job ends then. ``generation``: of the workers that began the training, or began it anew.
    ``stores``: checkpoints are written to a store. ``roster``: who starts anew now. An epoch without members says that
    agents wait, with a roster that workers start. ``run``: what event logs call this start of the job.
    """

    number: int
    members: tuple[WorkerId, ...]
    placement: Placement
    reason: str
    lost: tuple[WorkerId, ...]
    proposer: str
    time_seconds: float
    goes_back: bool = False
    restoring: int = -1
    waits_seconds: float = 0.0
    generation: int = 0
    roster: Roster | None = None
    stores: bool = False
    run: str = ""

    @property
    def trains(self) -> bool:
        """Whether anybody takes part; if not, agents wait for machines, or their workers start anew."""
        return bool(self.members)

    @property
    def waits(self) -> bool:
        """Whether agents wait for machines, and nobody starts yet."""
        return not self.members and self.roster is None

    def to_json(self) -> dict[str, Any]:
        return {
            "number": self.number,
            "members": list(self.members),
            "placement": self.placement.to_json(),
            "reason": self.reason,
            "lost": list(self.lost),
            "proposer": self.proposer,
            "time_seconds": self.time_seconds,
            **({"goes_back": True} if self.goes_back else {}),
            **({"restoring": self.restoring} if self.restoring >= 0 else {}),
            **({"waits_seconds": self.waits_seconds} if self.waits_seconds else {}),
            **({"generation": self.generation} if self.generation else {}),
            **({"stores": True} if self.stores else {}),
            **({"run": self.run} if self.run else {}),
            **({} if self.roster is None else {"roster": self.roster.to_json()}),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> EpochRecord:
        return cls(
            number=value["number"],
            members=tuple(value["members"]),
            placement=Placement.from_json(value["placement"]),
            reason=value["reason"],
            lost=tuple(value["lost"]),
            proposer=value["proposer"],
            time_seconds=value["time_seconds"],
            goes_back=bool(value.get("goes_back", False)),
            restoring=int(value.get("restoring", -1)),
            waits_seconds=float(value.get("waits_seconds", 0.0)),
            generation=int(value.get("generation", 0)),
            roster=None if value.get("roster") is None else Roster.from_json(value["roster"]),
            stores=bool(value.get("stores", False)),
            run=value.get("run", ""),
        )


@dataclass(frozen=True)
class JobFailure:
    """Why the job ends without finishing. ``traceback`` is empty unless the kind is ``user_error``."""

    worker: WorkerId
    kind: FailureKind
    message: str
    traceback: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> JobFailure:
        return cls(**value)


@dataclass(frozen=True)
class AgentRecord:
    """A slot's agent, for as long as it runs: the slot's rank, its node, its process.

    ``machine``: see :func:`~deepspeed_bamboo.coordination.machine_identity.own_machine`; ``node`` is but a name.
    ``launcher``: the process there that started it. ``keeps_etcd``: the job's own etcd, which other machines need.
    """

    rank: int
    node: str
    pid: int
    machine: str = ""
    launcher: int = 0
    keeps_etcd: bool = False

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> AgentRecord:
        return cls(**value)


@dataclass(frozen=True)
class EndedJob:
    """How a job ended, for commands that ask when its keys, or its etcd, are gone.

    ``state``: finished, stopped (by request) or failed. ``step``: the last one that is known of; -1 if none is.
    ``failure``: the kind of the failure; empty for none, and where an older version wrote this.
    """

    job: str
    state: str
    detail: str
    step: int
    time_seconds: float
    failure: str = ""

    @property
    def final(self) -> bool:
        """Whether nobody starts the job's command again."""
        return self.state in ("finished", "stopped") or self.failure in FINAL_FAILURES

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> EndedJob:
        return cls(**value)


@dataclass(frozen=True)
class Drain:
    """``node`` will be left: what it hosts moves elsewhere at a boundary, and its workers end.

    ``deadline_seconds`` is how much time there was at the request, None for no hurry. A watcher
    counts it from the moment it gets the request, so that clocks don't matter; ``time_seconds`` is the
    wall clock at the request, for people to read.
    """

    node: str
    deadline_seconds: float | None
    reason: str
    time_seconds: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Drain:
        return cls(**value)


@dataclass(frozen=True)
class Change:
    """Something in the job that is new to this watcher. ``value`` None means that it is no longer there.

    | kind         | worker        | epoch | value                        |
    |--------------|---------------|-------|------------------------------|
    | epoch        |               | its n | EpochRecord                  |
    | member       | the worker    |       | Member                       |
    | agent        | slot's rank   |       | AgentRecord                  |
    | ended        | the worker    |       | dict                         |
    | progress     | the worker    | its n | dict                         |
    | suspicion    | the suspect   | its n | dict: reporter, reason       |
    | generation   |               |       | int                          |
    | drain        | the node      |       | Drain                        |
    | stop         |               |       | str: why                     |
    | failure      |               |       | JobFailure                   |
    | finished     |               |       | dict                         |
    | hang         | the worker    |       | dict: rank, doing, stack...  |
    | resync       |               |       | everything missed was told   |
    """

    kind: ChangeKind
    worker: WorkerId = ""
    epoch: int = -1
    value: Any = None
