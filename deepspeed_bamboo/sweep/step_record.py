"""What the workers' event logs prove of a run: who stepped what, and which micro-batches went in."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from deepspeed_bamboo.core.grid import Grid

Event = Mapping[str, Any]


def step_problems(logs: Mapping[str, Sequence[Event]], *, grid: Grid, steps: int, micro_batches: int) -> list[str]:
    """What is wrong with the ``step`` events of all workers together, a line each; nothing when all is well.

    ``logs``: every worker's events, in its order. In every step from 0 to ``steps`` each coordinate must have been
    stepped by exactly one worker, and each pipeline's micro-batches used by exactly one, all of them and in order.
    A worker killed after everybody had agreed on a step did not live to say so; its shadow has that step.
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
    for step in range(steps):
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
