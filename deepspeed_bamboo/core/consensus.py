"""What the survivors of a loss conclude from each other's reports: which iteration is decided, which goes on.

Everybody runs an endless sequence of activities (a training iteration, an evaluation, a digest), each ended
by an agreement. An agreement needs everybody, so two workers are at most one activity apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from deepspeed_bamboo.core.grid import Coordinate
from deepspeed_bamboo.core.placement import WorkerId
from deepspeed_bamboo.core.progress import CoordinateProgress
from deepspeed_bamboo.core.restoring import Kept


@dataclass(frozen=True)
class Report:
    """What one survivor publishes after a change of epoch.

    ``activity`` counts from 0; ``kind`` is None while the worker has not started it. ``rounds`` are the
    agreements seen in this activity (opaque; the first one decides it), ``previous`` those of the one before.
    ``progress`` covers the coordinates that the worker hosted when the epoch changed, ``redundant`` the
    shadows that it held: how much of their work is stored. ``step``: how many iterations were complete when this
    activity began. ``kept``: what it has in host memory, for a loss that leaves no live copy of a stage.
    """

    activity: int
    kind: str | None = None
    rounds: tuple[str, ...] = ()
    previous: tuple[str, ...] = ()
    progress: Mapping[Coordinate, CoordinateProgress] = field(default_factory=dict)
    redundant: Mapping[Coordinate, CoordinateProgress] = field(default_factory=dict)
    step: int = 0
    kept: Kept = field(default_factory=Kept)

    def outline(self) -> Report:
        """The same with blanks for the texts of agreements, which grow with the number of workers.

        That is what everybody publishes; :func:`keeper` says whose texts are needed after all.
        """
        return replace(self, rounds=("",) * len(self.rounds), previous=("",) * len(self.previous))

    def seen_in(self, activity: int) -> tuple[str, ...]:
        """The agreements seen in ``activity``, of this one and the one before."""
        return {self.activity: self.rounds, self.activity - 1: self.previous}.get(activity, ())

    def to_json(self) -> dict[str, Any]:
        """A value that ``json`` can write and :meth:`from_json` reads back equal."""
        return {
            "activity": self.activity,
            "kind": self.kind,
            "rounds": list(self.rounds),
            "previous": list(self.previous),
            "progress": {str(c): p.to_json() for c, p in self.progress.items()},
            "redundant": {str(c): p.to_json() for c, p in self.redundant.items()},
            "step": self.step,
            "kept": self.kept.to_json(),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Report:
        """Inverse of :meth:`to_json`. Raises KeyError or ValueError for anything else."""
        texts = [*value["rounds"], *value["previous"]]
        right = isinstance(value["activity"], int) and isinstance(value["kind"], str | None)
        if not right or not all(isinstance(text, str) for text in texts):
            raise ValueError("a report has a number, a kind and texts of agreements")
        return cls(
            activity=value["activity"],
            kind=value["kind"],
            rounds=tuple(value["rounds"]),
            previous=tuple(value["previous"]),
            progress={Coordinate.parse(c): CoordinateProgress.from_json(p) for c, p in value["progress"].items()},
            redundant={Coordinate.parse(c): CoordinateProgress.from_json(p) for c, p in value["redundant"].items()},
            step=int(value["step"]),
            kept=Kept.from_json(value["kept"]),
        )


@dataclass(frozen=True)
class Conclusion:
    """The common conclusion.

    ``activity`` is the newest one that anybody is in. ``agreed`` maps an activity to the agreements that
    somebody saw in it: everybody carries it out. When ``activity`` itself is not in it, it goes on from
    ``progress``, as ``kind`` (None: nobody has started it). ``step``: how many iterations were complete when it began.
    ``kept``: what each survivor has in host memory. ``owned`` and ``stored`` are ``progress`` and ``redundant`` by the
    worker that reported it.
    """

    activity: int
    kind: str | None
    agreed: Mapping[int, tuple[str, ...]]
    progress: Mapping[Coordinate, CoordinateProgress]
    redundant: Mapping[Coordinate, CoordinateProgress] = field(default_factory=dict)
    step: int = 0
    kept: Mapping[WorkerId, Kept] = field(default_factory=dict)
    owned: Mapping[WorkerId, Mapping[Coordinate, CoordinateProgress]] = field(default_factory=dict)
    stored: Mapping[WorkerId, Mapping[Coordinate, CoordinateProgress]] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        """How many iterations are complete, or agreed upon."""
        return self.step + int(self.kind == "train" and self.decided)

    @property
    def decided(self) -> bool:
        """True when the newest activity is already agreed, so that nothing of it is recomputed."""
        return self.activity in self.agreed


def keeper(reports: Mapping[WorkerId, Report]) -> tuple[WorkerId | None, frozenset[WorkerId]]:
    """Who has to publish its whole report, and who needs it because it has seen fewer agreements; mostly nobody.

    Everybody still works on, or has finished, the oldest activity that anybody is in; agreements missing there are
    the only ones that can be missed, since later ones would have needed everybody.
    """
    oldest = min(report.activity for report in reports.values())
    seen = {worker: len(report.seen_in(oldest)) for worker, report in sorted(reports.items())}
    most = max(seen, key=lambda worker: seen[worker])
    lacking = (w for w, report in reports.items() if report.activity == oldest and seen[w] < seen[most])
    needing = frozenset(lacking)
    return (most if needing else None), needing


def conclude(reports: Mapping[WorkerId, Report]) -> Conclusion:
    """Conclude from all survivors' reports; the same reports give the same conclusion everywhere.

    A worker one activity behind takes over the agreements that the others saw in it. Reports may be outlines,
    except for the keeper's where its texts are needed. Raises ValueError when reports are further apart than
    agreements allow.
    """
    newest = max(report.activity for report in reports.values())
    behind = {worker: report for worker, report in reports.items() if report.activity < newest}
    too_far = sorted(worker for worker, report in behind.items() if report.activity < newest - 1)
    if too_far:
        raise ValueError(f"workers {too_far} are over one activity behind {newest}; the protocol forbids it")
    agreed: dict[int, tuple[str, ...]] = {}
    for report in reports.values():
        for activity, rounds in ((report.activity, report.rounds), (report.activity - 1, report.previous)):
            known = agreed.get(activity, ())
            if (len(rounds), any(rounds)) > (len(known), any(known)):
                agreed[activity] = rounds
    if behind and newest - 1 not in agreed:
        raise ValueError(f"nobody kept the agreement of activity {newest - 1}, which {sorted(behind)} still need")
    kinds = {report.kind for report in reports.values() if report.activity == newest and report.kind is not None}
    if len(kinds) > 1:
        raise ValueError(f"activity {newest} differs by worker: {sorted(kinds)}; every rank must make the same calls")
    owned: dict[WorkerId, dict[Coordinate, CoordinateProgress]] = {}
    stored: dict[WorkerId, dict[Coordinate, CoordinateProgress]] = {}
    for worker, report in reports.items():
        started = report.activity == newest and report.kind is not None
        for result, reported in ((owned, report.progress), (stored, report.redundant)):
            result[worker] = {c: counts if started else CoordinateProgress() for c, counts in reported.items()}
    progress = {c: counts for its in owned.values() for c, counts in its.items()}
    redundant = {c: counts for its in stored.values() for c, counts in its.items()}
    step = next(report.step for report in reports.values() if report.activity == newest)
    kept = {worker: report.kept for worker, report in sorted(reports.items())}
    return Conclusion(newest, kinds.pop() if kinds else None, agreed, progress, redundant, step, kept, owned, stored)
