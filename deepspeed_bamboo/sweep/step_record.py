"""What the workers' event logs prove of a run: who stepped what, which micro-batches went in, what was done again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deepspeed_bamboo.core.grid import Grid

Event = Mapping[str, Any]


@dataclass(frozen=True)
class WayBack:
    """After a loss of all live copies of a stage: from ``step`` to the state of ``from_step``, which ``source`` had.

    ``workers`` were lost. ``redone`` steps were done again, and all of it took ``seconds``.
    """

    step: int
    from_step: int
    source: str
    redone: int
    seconds: float
    workers: tuple[str, ...]


def ways_back(events: Iterable[Event]) -> tuple[WayBack, ...]:
    """Each once, whoever has logged it, in the order of steps; the longest of the survivors' times."""
    found: dict[tuple[int, int, tuple[str, ...]], WayBack] = {}
    for event in events:
        if event["event"] != "restored":
            continue
        workers = tuple(event.get("workers", ()))
        key = event["step"], event["from_step"], workers
        seconds = max(float(event.get("seconds", 0.0)), found[key].seconds if key in found else 0.0)
        redone = event.get("redone", event["step"] - event["from_step"])
        found[key] = WayBack(*key[:2], event.get("source", "store"), redone, seconds, workers)
    return tuple(way for _, way in sorted(found.items()))


def redone_problems(events: Iterable[Event], losses: Mapping[int, float]) -> list[str]:
    """A line for each step that was done again with another loss than the undisturbed run's ``losses`` have."""
    return [
        f"step {event['step']} was done again with the loss {event['loss']!r}, not {losses.get(event['step'])!r}"
        for event in events
        if event["event"] == "redone" and repr(event["loss"]) != repr(losses.get(event["step"]))
    ]


def step_problems(
    logs: Mapping[str, Sequence[Event]],
    *,
    grid: Grid,
    steps: int,
    micro_batches: int,
    cut_short: Collection[int] = (),
) -> list[str]:
    """What is wrong with the ``step`` events of all workers together, a line each; nothing when all is well.

    ``logs``: every worker's events, in its order. In every step from 0 to ``steps`` each coordinate must have been
    stepped by exactly one worker, and each pipeline's micro-batches used by exactly one, all of them and in order.
    A worker killed after everybody had agreed on a step did not live to say so; its shadow has that step. Steps
    of ``cut_short`` are left out: workers were killed in them wherever they were, or went back and did them again.
    """
    stepped: dict[tuple[int, str], list[str]] = defaultdict(list)
    used: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    silent: set[tuple[int, str]] = set()
    for worker, events in logs.items():
        hosted: Sequence[str] = ()
        for event in events:
            hosted = event.get("hosted", hosted)
            if event["event"] == "fault" and event["fault"]["at"] == "step":
                silent.update((event["step"], coordinate) for coordinate in hosted)
            if event["event"] != "step":
                continue
            for name in hosted:
                stepped[event["step"], name].append(worker)
            for pipeline, (begin, end) in event["used"].items():
                used[event["step"], int(pipeline)].append((begin, end))
    problems = []
    for step in sorted(set(range(steps)).difference(cut_short)):
        for coordinate in grid:
            workers = stepped[step, str(coordinate)]
            if len(workers) > 1 or (not workers and (step, str(coordinate)) not in silent):
                problems.append(f"{coordinate} was stepped by {' and '.join(workers) or 'nobody'} in step {step}")
        for pipeline in range(grid.pipelines):
            ranges = used[step, pipeline]
            right = (step * micro_batches, (step + 1) * micro_batches)
            if ranges != [right] and (ranges or (step, f"{pipeline}.0") not in silent):
                problems.append(f"pipeline {pipeline} used micro-batches {ranges}, not {right}, in step {step}")
    return problems
