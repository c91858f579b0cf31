"""How long losses and joins held a job up, from its events. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Event = Mapping[str, Any]

PARTS = ("detect", "abort", "regroup", "plan", "recompute", "finish")


@dataclass(frozen=True)
class Pause:
    """One scripted kill. All times are in seconds.

    The parts follow one another on the worker that took over: ``detect`` (from the kill to its hearing of the new
    epoch), ``abort``, ``regroup``, ``plan`` (to the first instruction done again), ``recompute`` (to where the lost
    worker had been) and ``finish`` (to the end of the interrupted iteration). ``to_recompute`` and ``to_iteration_end``
    are counted from the kill. ``protect`` is how long workers waited for new shadows, which are copied beside the rest
    of the iteration, ``undisturbed`` an iteration of this run without a loss. ``slowest_regroup`` is the longest of
    all survivors.
    """

    step: int
    lost: tuple[str, ...]
    parts: Mapping[str, float]
    to_recompute: float
    to_iteration_end: float
    slowest_regroup: float
    protect: float | None
    undisturbed: float


@dataclass(frozen=True)
class Join:
    """One worker taken in. ``pause`` is the longest of the survivors, ``transfer`` the part of it for state.

    ``after_loss``: seconds from the last kill before it to its being a part of the job.
    """

    step: int
    workers: tuple[str, ...]
    pause: float
    transfer: float
    after_loss: float | None


def pauses(events: Sequence[Event]) -> list[Pause]:
    """One for each scripted fault that some worker took over from, in order of time."""
    usual = undisturbed_seconds(events)
    return [
        _pause(fault, found, events=events, undisturbed=usual)
        for fault in _of(events, "fault")
        if (found := [e for e in _of(events, "failover") if e["step"] == fault["step"] and e["t"] > fault["t"]])
    ]


def joins(events: Sequence[Event]) -> list[Join]:
    """One for each worker, or group of workers, that was taken in, in order of time."""
    found: dict[int, list[Event]] = {}
    for event in _of(events, "reconfigured"):
        if event["joining"]:
            found.setdefault(event["epoch"], []).append(event)
    kills = [event["t"] for event in _of(events, "fault")]
    result = []
    for _, reports in sorted(found.items()):
        at = max(event["t"] for event in reports)
        before = [kill for kill in kills if kill < at]
        result.append(
            Join(
                step=reports[0]["step"],
                workers=tuple(reports[0]["joining"]),
                pause=max(event["seconds"] for event in reports),
                transfer=max(event.get("transfer_seconds", 0.0) for event in reports),
                after_loss=at - max(before) if before else None,
            )
        )
    return result


def undisturbed_seconds(events: Sequence[Event]) -> float:
    """The median iteration of those in which nothing happened, without the first two; 0.0 when there is none."""
    disturbed = {e["step"] for kind in ("fault", "failover", "reconfigured", "joined") for e in _of(events, kind)}
    quiet = [e["seconds"] for e in _of(events, "step") if e["step"] > 1 and not {e["step"], e["step"] - 1} & disturbed]
    return statistics.median(quiet) if quiet else 0.0


def spread(values: Iterable[float]) -> dict[str, float]:
    """Median, least and greatest; empty for no values."""
    known = list(values)
    return {"median": statistics.median(known), "least": min(known), "greatest": max(known)} if known else {}


def straight_line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Constant and slope of the straight line through ``points`` (x, y) with the least squared error.

    Raises ValueError for fewer than two different x.
    """
    if len({x for x, _ in points}) < 2:
        raise ValueError(f"{len(points)} points do not make a line; give two or more with different x")
    slope, constant = statistics.linear_regression([x for x, _ in points], [y for _, y in points])
    return constant, slope


def _of(events: Iterable[Event], kind: str) -> list[Event]:
    return [event for event in events if event["event"] == kind]


def _pause(fault: Event, reports: Sequence[Event], *, events: Sequence[Event], undisturbed: float) -> Pause:
    report = max(reports, key=lambda event: (bool(event.get("taken_over")), event["pause_seconds"]["total"]))
    seconds, kill = report["pause_seconds"], fault["t"]
    regrouped, first = report["regrouped_t"], report["first_recomputed_t"]
    caught_up = max(regrouped + seconds["recompute"], first)
    ended = report["t"]
    protections = [e for e in _of(events, "protected") if e["step"] == report["step"] + 1 and e["t"] > kill]
    return Pause(
        step=report["step"],
        lost=tuple(report["lost"]),
        parts={
            "detect": regrouped - seconds["regroup"] - seconds["abort"] - kill,
            "abort": seconds["abort"],
            "regroup": seconds["regroup"],
            "plan": first - regrouped,
            "recompute": caught_up - first,
            "finish": ended - caught_up,
        },
        to_recompute=first - kill,
        to_iteration_end=ended - kill,
        slowest_regroup=max(event["pause_seconds"]["regroup"] for event in reports),
        protect=max((event["waited_seconds"] for event in protections), default=None),
        undisturbed=undisturbed,
    )
