"""Which worker gets which block, so that the most bytes stay where they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def match(kept: Sequence[Mapping[int, int]], *, alike: Mapping[int, float]) -> list[int]:
    """For every block the worker that gets it.

    ``kept[b]`` are the bytes of block ``b`` by the workers that hold some. Block ``b`` is one for worker ``b``; only
    workers with the same value in ``alike`` exchange blocks. The pair with the most bytes comes first, then, two by
    two, what exchanging would keep more: few blocks of one worker lie on more than a few others, so this is the
    maximum in practice; where it is not, more bytes move than had to.
    """
    count = len(kept)
    result, taken = [-1] * count, [False] * count
    pairs = sorted(((-size, block, worker) for block, its in enumerate(kept) for worker, size in its.items()))
    for _, block, worker in pairs:
        if result[block] < 0 and not taken[worker] and alike[block] == alike[worker]:
            result[block], taken[worker] = worker, True
    free: dict[float, list[int]] = {}
    for worker in reversed(range(count)):
        if not taken[worker]:
            free.setdefault(alike[worker], []).append(worker)
    for block in range(count):
        if result[block] < 0:
            result[block] = free[alike[block]].pop()
    _exchange(result, kept, alike)
    return result


def _exchange(result: list[int], kept: Sequence[Mapping[int, int]], alike: Mapping[int, float]) -> None:
    """Exchange the workers of two blocks as long as more bytes stay. Only blocks with a choice are looked at."""
    better = True
    while better:
        better = False
        place = {worker: block for block, worker in enumerate(result)}
        for block, its in enumerate(kept):
            for worker in its:
                other = place[worker]
                if other == block or alike[other] != alike[block]:
                    continue
                mine = result[block]
                now = its.get(mine, 0) + kept[other].get(worker, 0)
                if its[worker] + kept[other].get(mine, 0) > now:
                    result[block], result[other] = worker, mine
                    place[worker], place[mine] = block, other
                    better = True
