"""What the workers' event logs prove of a run: who stepped what, and which micro-batches went in."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from deepspeed_bamboo.core.grid import Grid


def step_problems(events: Iterable[Mapping[str, Any]], *, grid: Grid, steps: int, micro_batches: int) -> list[str]:
    """What is wrong with the ``step`` events of all workers together, a line each; nothing when all is well.

    In every step from 0 to ``steps`` each coordinate must have been stepped by exactly one worker, and each pipeline's
    micro-batches used by exactly one, all of them and in order.
    """
    stepped: dict[tuple[int, str], list[str]] = defaultdict(list)
    used: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for event in events:
        if event["event"] != "step":
            continue
        for coordinate in event["hosted"]:
            stepped[event["step"], coordinate].append(event["worker"])
        for pipeline, (begin, end) in event["used"].items():
            used[event["step"], int(pipeline)].append((begin, end))
    problems = [
        f"{coordinate} was stepped by {' and '.join(stepped[step, str(coordinate)]) or 'nobody'} in step {step}"
        for step in range(steps)
        for coordinate in grid
        if len(stepped[step, str(coordinate)]) != 1
    ]
    problems += [
        f"step {step} of pipeline {pipeline} used micro-batches {used[step, pipeline]}, not those from "
        f"{step * micro_batches} on"
        for step in range(steps)
        for pipeline in range(grid.pipelines)
        if used[step, pipeline] != [(step * micro_batches, (step + 1) * micro_batches)]
    ]
    return problems
