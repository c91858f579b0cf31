"""Rows of stages cut into consecutive blocks, one for each worker, such that the slowest is done soonest."""

from __future__ import annotations

from collections.abc import Sequence

_ROUNDS = 40  # of halving an interval: more exact than what is measured


def cut(work: Sequence[float], speeds: Sequence[float], *, late: bool = False) -> list[int]:
    """The number of the worker of each stage: consecutive blocks in the order of ``speeds``, the slowest soonest.

    Of the cuts whose slowest block takes least the first blocks are the longest, or, with ``late``, the last ones.
    Blocks may be empty. The result is exact up to the resolution of floating point.
    """
    if late:
        mirrored = cut(work[::-1], speeds[::-1])
        return [len(speeds) - 1 - worker for worker in mirrored[::-1]]
    low, high = max(sum(work) / sum(speeds), max(work) / max(speeds)), sum(work) / max(speeds)
    low *= 1.0 - 1e-9
    best = _filled(work, speeds, limit=high * (1.0 + 1e-9)) or [max(range(len(speeds)), key=speeds.__getitem__)] * len(
        work
    )
    for _ in range(_ROUNDS):
        middle = (low + high) / 2.0
        found = _filled(work, speeds, limit=middle * (1.0 + 1e-9))
        if found is None:
            low = middle
        else:
            best, high = found, middle
    return best


def _filled(work: Sequence[float], speeds: Sequence[float], *, limit: float) -> list[int] | None:
    """Every worker in turn takes as many stages as it does within ``limit``; None if some are left over."""
    result: list[int] = []
    worker, busy = 0, 0.0
    for seconds in work:
        while worker < len(speeds) and busy + seconds > limit * speeds[worker]:
            worker, busy = worker + 1, 0.0
        if worker == len(speeds):
            return None
        result.append(worker)
        busy += seconds
    return result


def shared(work: Sequence[float], speeds: Sequence[float]) -> list[int]:
    """As :func:`cut`, but every worker takes its share of what is left, as far as the slowest is no slower for it."""
    exact = cut(work, speeds)
    busy = [0.0] * len(speeds)
    for seconds, worker in zip(work, exact, strict=True):
        busy[worker] += seconds
    limit = max(b / speed for b, speed in zip(busy, speeds, strict=True)) * (1.0 + 1e-9)
    result: list[int] = []
    for worker, speed in enumerate(speeds):
        left = work[len(result) :]
        share = sum(left) * speed / sum(speeds[worker:])
        taken = 0.0
        for i, seconds in enumerate(left):
            enough = taken > 0.0 and taken + seconds / 2.0 > share
            if worker < len(speeds) - 1 and enough and _filled(left[i:], speeds[worker + 1 :], limit=limit) is not None:
                break
            if taken + seconds > limit * speed:
                break
            taken += seconds
            result.append(worker)
    return result if len(result) == len(work) else exact


def dealt(work: Sequence[float], speeds: Sequence[float], *, pipelines: int) -> list[list[int]]:
    """Single stages in turn, in each pipeline beginning with another worker: short bubbles, many messages."""
    count = len(speeds)
    turns = [pipeline * count // pipelines for pipeline in range(pipelines)]
    return [[(turn + stage) % count for stage in range(len(work))] for turn in turns]


def rotated(work: Sequence[float], speeds: Sequence[float], *, pipelines: int) -> list[list[int]]:
    """For each of ``pipelines`` pipelines of the same stages the number of the worker of each stage.

    All workers host blocks of all pipelines, the first block of each pipeline on another worker, so that the bubbles
    of one pipeline are filled by the others. What a worker has of one pipeline is made up for in the next ones.
    """
    count, busy = len(speeds), [0.0] * len(speeds)
    result: list[list[int]] = []
    for pipeline in range(pipelines):
        turn = pipeline * count // pipelines
        order = [(turn + i) % count for i in range(count)]
        share = (pipeline + 1) * sum(work) / sum(speeds)
        # What is left to a worker of its share so far; a little for those that have more than it already.
        room = [max(share * speeds[worker] - busy[worker], 1e-6 * share) for worker in order]
        owners = [order[position] for position in cut(work, room)]
        for seconds, worker in zip(work, owners, strict=True):
            busy[worker] += seconds
        result.append(owners)
    return result
