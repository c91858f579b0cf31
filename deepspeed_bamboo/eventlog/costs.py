"""What a job has measured of itself: from its event log, the times that `simulate`, `advise` and `plan` read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

from deepspeed_bamboo.core.grid import Coordinate, Grid
from deepspeed_bamboo.core.placement import Placement
from deepspeed_bamboo.core.timing import Profile, iteration_seconds
from deepspeed_bamboo.errors import EventLogError
from deepspeed_bamboo.eventlog.runs import runs_in

Event = Mapping[str, Any]

QUIET_STEPS = 2  # at the start, and after anything that happens, whose times say little


@dataclass(frozen=True)
class MeasuredJob:
    """A job's own measurements.

    Attributes:
        profile: passes of its stages.
        pipelines: of its grid.
        micro_batches: of each pipeline.
        samples_per_step: of all pipelines.
        fixed_seconds: of an iteration, besides its passes.
        costs: by the names that `policies.live` of a scenario has; only what the log tells.
        counts: how many losses and moves these are from.
        mode: of redundancy, in most iterations: what its replicas cost is in the times. None: the log doesn't say.
        copies: shadows of each stage.
        alike: whether each pipeline had the whole state of its stages: not with bf16 or ZeRO. With one pipeline None.
        run: the name of the run in the log that was read; empty where events have none.
        runs: how many the log has.
        newer: how many of them are newer than this one, and too short.
    """

    profile: Profile
    pipelines: int
    micro_batches: int
    samples_per_step: int
    fixed_seconds: float
    costs: Mapping[str, float]
    counts: Mapping[str, int]
    mode: str | None = None
    copies: int | None = None
    alike: bool | None = None
    run: str = ""
    runs: int = 1
    newer: int = 0

    def to_json(self) -> dict[str, Any]:
        """What `bamboo.profile` has, and the rest beside it."""
        known = {"mode": self.mode, "copies": self.copies, "alike": self.alike}
        return {
            **self.profile.to_json(),
            "pipelines": self.pipelines,
            "micro_batches": self.micro_batches,
            "samples_per_step": self.samples_per_step,
            "fixed_seconds": self.fixed_seconds,
            "costs": dict(self.costs),
            "counts": dict(self.counts),
            **{name: value for name, value in known.items() if value is not None},
            "run": self.run,
        }


def measured_job(files: Mapping[str, Sequence[Event]]) -> MeasuredJob:
    """The measurements of the newest run in a log that was long enough.

    Args:
        files: the events of each worker, by the name of its file.

    Raises:
        EventLogError: the log has no event `profile`, or no step: the job was too short, or older than that event.
    """
    runs = runs_in(files)
    newer, run = next(
        ((newer, run) for newer, run in enumerate(reversed(runs)) if _of(run.events, "profile")), (0, None)
    )
    if run is None:
        raise EventLogError(
            "the log has no event `profile`, which a job writes once the times of all stages are known, after some "
            "iterations; let the job run for longer, and set bamboo.event_log"
        )
    events = run.events
    told = _of(events, "profile")
    newest = told[-1]
    # One that is told while somebody comes or goes has what others waited for in it.
    usual = median(event.get("handover", 0.0) for event in told)
    profile = Profile.from_json({**newest, "handover": usual})
    grid = Grid(newest["pipelines"], len(profile.forward))
    samples = next((event["samples"] for event in events if event["event"] == "step"), 0)
    return MeasuredJob(
        profile=profile,
        pipelines=grid.pipelines,
        micro_batches=newest["micro_batches"],
        samples_per_step=samples,
        fixed_seconds=_fixed_seconds(events, grid, profile, newest["micro_batches"]),
        costs={**_loss_costs(events), **_move_costs(events), **_way_back_costs(events)},
        counts={
            "losses": len({event["epoch"] for event in _of(events, "failover")}),
            "moves": len({event["epoch"] for event in _of(events, "reconfigured")}),
            "ways_back": len({(event["step"], event["from_step"]) for event in _restored_in_place(events)}),
        },
        mode=_mode(events),
        copies=newest.get("copies"),
        alike=newest.get("alike"),
        run=run.name,
        runs=len(runs),
        newer=newer,
    )


def _mode(events: Sequence[Event]) -> str | None:
    """The mode of most iterations, as `redundancy.mode` has it; None where the log doesn't say."""
    found = Counter(event["mode"] for event in _of(events, "step") if "mode" in event)
    return found.most_common(1)[0][0] if found else None


def step_ends(events: Iterable[Event]) -> dict[int, float]:
    """When each step had ended on all workers that log it: seconds since the epoch, by step."""
    ends: dict[int, float] = {}
    for event in _of(events, "step"):
        ends[event["step"]] = max(event["t"], ends.get(event["step"], 0.0))
    return ends


def is_near(step: int, happenings: Container[int]) -> bool:
    """Whether something happened in ``step``, in the one after it, or so shortly before that its time says little."""
    return any(step - back in happenings for back in range(-1, QUIET_STEPS + 1))


def _of(events: Iterable[Event], *kinds: str) -> list[Event]:
    return [event for event in events if event["event"] in kinds]


def _fixed_seconds(events: Sequence[Event], grid: Grid, profile: Profile, micro_batches: int) -> float:
    """Of iterations in which nothing happened: their time less that of their passes, by the plan's order."""
    owners: dict[int, dict[Coordinate, str]] = {}
    for event in _of(events, "step"):
        for text in event.get("hosted", ()):
            owners.setdefault(event["step"], {})[Coordinate.parse(text)] = str(event.get("worker"))
    disturbed = {event["step"] for event in _of(events, "fault", "failover", "reconfigured", "joined", "protected")}
    ends = step_ends(events)
    known: dict[tuple[tuple[Coordinate, str], ...], float] = {}
    found = []
    for step, end in ends.items():
        if (
            step < QUIET_STEPS
            or is_near(step, disturbed)
            or step - 1 not in ends
            or len(owners.get(step, ())) < len(grid)
        ):
            continue
        key = tuple(sorted(owners[step].items()))
        if key not in known:
            placement = Placement.of(grid, owners=owners[step], shadows={})
            known[key] = iteration_seconds(placement, profile, micro_batches=micro_batches)
        found.append(end - ends[step - 1] - known[key])
    return max(0.0, median(found)) if found else 0.0


def _loss_costs(events: Sequence[Event]) -> dict[str, float]:
    """Of each loss the parts of who took over: until it is known, and from then to the first instruction done again."""
    detect, regroup = [], []
    reports: dict[int, Event] = {}
    for event in _of(events, "failover"):
        best = reports.get(event["epoch"])
        if best is None or bool(event.get("taken_over")) > bool(best.get("taken_over")):
            reports[event["epoch"]] = event
    faults = _of(events, "fault")
    # Of a worker that had shadows alone nothing is done again: such losses tell only where there are no others.
    taken = [report for report in reports.values() if report.get("taken_over")]
    for report in taken or reports.values():
        parts = report["pause_seconds"]
        regrouped = report["regrouped_t"]
        heard = regrouped - parts["regroup"] - parts["abort"]
        struck = [fault["t"] for fault in faults if fault["step"] == report["step"] and fault["t"] <= heard]
        detect.append(heard - max(struck) if struck else parts["detect"])
        first = report.get("first_recomputed_t") or regrouped
        regroup.append(parts["abort"] + parts["regroup"] + max(0.0, first - regrouped))
    return {"detect_seconds": mean(detect), "regroup_seconds": mean(regroup)} if detect else {}


_WAY_BACK = {"memory": "in_place_seconds", "store": "restore_seconds"}
ANEW = "workers start anew"
"""The reason in the event ``restored`` of a worker that has no survivors."""


def _is_in_place(event: Event) -> bool:
    """Whether it is the event of a survivor that went back in its process, and not of a worker that started anew."""
    return event.get("source") in _WAY_BACK and "seconds" in event and event.get("reason") != ANEW


def _restored_in_place(events: Iterable[Event]) -> list[Event]:
    return [event for event in _of(events, "restored") if _is_in_place(event)]


def _way_back_costs(events: Sequence[Event]) -> dict[str, float]:
    """Of each way back in place what loading the state took, by where it came from: until the first step is done again.

    Where less than two were, how long one takes is not known, and counts as a part of loading.
    """
    found: dict[str, dict[tuple[int, int], float]] = {}
    redone: dict[str, list[float]] = {}
    for event in _of(events, "restored", "redone"):
        worker = str(event.get("worker"))
        if event["event"] == "redone":
            redone.setdefault(worker, []).append(event["t"])
            continue
        steps = [t for t in redone.pop(worker, []) if t >= event["t"] - event.get("seconds", 0.0)]
        if not _is_in_place(event):
            continue
        name = _WAY_BACK[event["source"]]
        begun = event["t"] - event["seconds"]
        each = (steps[-1] - steps[0]) / (len(steps) - 1) if len(steps) > 1 else 0.0
        loading = max(0.0, steps[0] - each - begun) if len(steps) > 1 else event["seconds"]
        key = event["step"], event["from_step"]
        of_source = found.setdefault(name, {})
        of_source[key] = max(loading, of_source.get(key, 0.0))
    return {name: mean(seconds.values()) for name, seconds in found.items()}


def _move_costs(events: Sequence[Event]) -> dict[str, float]:
    """Of each reconfiguration what those waited who stayed, and the longest transfer of all who took part.

    By least squares what the state of a coordinate takes; who joins takes longer, since all is new to it, and so do the
    others, who connect to it.
    """
    whole: dict[bool, list[float]] = {False: [], True: []}
    points: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for reports in moves_of(events):
        waited, transfer = move_seconds(reports)
        joined = bool(reports[0]["joining"])
        whole[joined].append(max(0.0, waited - transfer))
        points[joined].append((max(event.get("received", 0) for event in reports), transfer))
    if not any(whole.values()):
        return {}
    costs = {"handover_seconds": mean(whole[False] or whole[True])}
    base, each = _line(points[False] or points[True])
    costs |= {"transfer_seconds": base, "coordinate_copy_seconds": each}
    if points[False] and points[True]:
        costs["join_handover_seconds"] = max(0.0, mean(whole[True]) - mean(whole[False]))
        longer = mean(taken - base - each * received for received, taken in points[True])
        costs["join_transfer_seconds"] = max(0.0, longer)
    return costs


def moves_of(events: Iterable[Event]) -> list[list[Event]]:
    """The reports of each reconfiguration, by all who took part."""
    moves: dict[int, list[Event]] = {}
    for event in _of(events, "reconfigured", "joined"):
        moves.setdefault(event["epoch"], []).append(event)
    return list(moves.values())


def move_seconds(reports: Sequence[Event]) -> tuple[float, float]:
    """For how long those waited who stayed, and what the longest transfer took, that of a worker who joins included."""
    stayed = [event for event in reports if event["event"] == "reconfigured"] or reports
    return max(event["seconds"] for event in stayed), max(event["transfer_seconds"] for event in reports)


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Constant and slope, neither below 0, with the least squared error; where all x are alike, all is the constant."""
    mean_x, mean_y = (sum(point[i] for point in points) / len(points) for i in (0, 1))
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    if spread <= 0.0:
        return mean_y, 0.0
    slope = max(0.0, sum((x - mean_x) * (y - mean_y) for x, y in points) / spread)
    if mean_y >= slope * mean_x:
        return mean_y - slope * mean_x, slope
    return 0.0, sum(x * y for x, y in points) / sum(x * x for x, _ in points)
