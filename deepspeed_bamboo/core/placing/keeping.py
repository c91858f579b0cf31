"""How much of the current placement can stay: the most bytes that keep a worker which holds their state."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


def keep_most(held: Sequence[Sequence[int]], sizes: Sequence[int], *, workers: int, most: int) -> list[int]:
    """A worker for every coordinate that can stay with one who holds its state, -1 for the others.

    ``held`` are the workers that hold each coordinate's state (owner first), ``sizes`` their bytes. No worker gets
    more than ``most``. The bytes that stay are the maximum, whatever the neighbours: sets of coordinates that can
    stay together are a transversal matroid, where taking the largest first is exact. So what is left over is a lower
    bound for the bytes that any placement moves.
    """
    host = [-1] * len(held)
    hosted: list[list[int]] = [[] for _ in range(workers)]
    full: set[int] = set()
    for coordinate in sorted(range(len(held)), key=lambda c: -sizes[c]):
        _make_room(coordinate, held, host, hosted, most=most, full=full)
    return host


def _make_room(
    coordinate: int,
    held: Sequence[Sequence[int]],
    host: list[int],
    hosted: list[list[int]],
    *,
    most: int,
    full: set[int],
) -> None:
    """Give ``coordinate`` to a holder, if need be by moving others to holders of theirs; else change nothing.

    ``full`` are the workers from whom no search found room: none ever will, as what they host stays among them.
    Each is searched once, so that those who can't stay cost little.
    """
    came_from: dict[int, tuple[int, int]] = {}
    queue, seen, tried = deque([coordinate]), {coordinate}, set[int]()
    while queue:
        one = queue.popleft()
        for worker in held[one]:
            if worker == host[one] or worker in full or worker in tried:
                continue
            tried.add(worker)
            if len(hosted[worker]) < most:
                _shift(one, worker, came_from, host, hosted)
                return
            for other in hosted[worker]:
                if other not in seen:
                    seen.add(other)
                    came_from[other] = (one, worker)
                    queue.append(other)
    full |= tried


def _shift(
    last: int, target: int, came_from: dict[int, tuple[int, int]], host: list[int], hosted: list[list[int]]
) -> None:
    """Move ``last`` to ``target``, and into each place that this frees the one that asked for it."""
    while True:
        if host[last] >= 0:
            hosted[host[last]].remove(last)
        host[last] = target
        hosted[target].append(last)
        if last not in came_from:
            return
        last, target = came_from[last]
