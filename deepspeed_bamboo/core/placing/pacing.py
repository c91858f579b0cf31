"""How long an iteration takes with given owners, by blocks: what ``core/timing.py`` says, fast enough for a search.

A block counts as one stage here, with the durations of all its stages. So a worker that hosts several blocks turns to
another one only between whole passes of a block; the plan itself may do so between two stages.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby

from deepspeed_bamboo.core.instructions import Op
from deepspeed_bamboo.core.schedule import backward_slot, forward_slot, stage_order

# Slot, whether it is a forward, micro-batch.
_Item = tuple[int, bool, int]


@lru_cache(maxsize=1024)
def _template(*, blocks: int, block: int, micro_batches: int) -> tuple[_Item, ...]:
    return tuple(
        (forward_slot(stage=block, micro_batch=m), True, m)
        if op is Op.FNC
        else (backward_slot(stages=blocks, stage=block, micro_batch=m), False, m)
        for op, m in stage_order(stages=blocks, micro_batches=micro_batches, stage=block)
    )


class Pacing:
    """Times iterations of ``micro_batches`` of pipelines whose stages take ``forward`` and ``backward`` seconds.

    ``speeds`` are those of the workers by number, ``handover`` what a message between two of them takes.
    """

    def __init__(
        self,
        *,
        forward: Sequence[float],
        backward: Sequence[float],
        speeds: Sequence[float],
        handover: float,
        micro_batches: int,
    ) -> None:
        self._durations = (tuple(backward), tuple(forward))  # indexed by "is forward"
        self._speeds = speeds
        self._handover = handover
        self._micro_batches = micro_batches

    def passes(self, owners: Sequence[int]) -> int:
        """How much there is to simulate."""
        return 2 * self._micro_batches * len(self._runs(owners))

    def seconds(self, owners: Sequence[int]) -> float:
        """Of an iteration; ``owners`` are the workers of all stages, pipeline by pipeline."""
        stages, workers, first, last = len(self._durations[0]), [], [], []
        durations: list[tuple[float, float]] = []
        items: list[tuple[_Item, ...]] = []
        runs = self._runs(owners)
        counts: dict[int, int] = {}
        for begin, _ in runs:
            counts[begin // stages] = counts.get(begin // stages, 0) + 1
        number = 0
        for begin, stop in runs:
            pipeline, worker = begin // stages, owners[begin]
            number = 0 if begin % stages == 0 else number + 1
            its = slice(begin % stages, (stop - 1) % stages + 1)
            durations.append(
                (
                    sum(self._durations[0][its]) / self._speeds[worker],
                    sum(self._durations[1][its]) / self._speeds[worker],
                )
            )
            items.append(_template(blocks=counts[pipeline], block=number, micro_batches=self._micro_batches))
            workers.append(worker)
            first.append(number == 0)
            last.append(number == counts[pipeline] - 1)
        return self._run(workers, durations, items, first, last)

    def _runs(self, owners: Sequence[int]) -> list[tuple[int, int]]:
        """Of every block its first stage and the one after its last, counted through all pipelines."""
        stages = len(self._durations[0])
        runs = ([*run] for _, run in groupby(range(len(owners)), key=lambda i: (i // stages, owners[i])))
        return [(run[0], run[-1] + 1) for run in runs]

    def _run(
        self,
        workers: Sequence[int],
        durations: Sequence[tuple[float, float]],
        items: Sequence[tuple[_Item, ...]],
        first: Sequence[bool],
        last: Sequence[bool],
    ) -> float:
        hosted: dict[int, list[int]] = {}
        for block, worker in enumerate(workers):
            hosted.setdefault(worker, []).append(block)
        following = [0] * len(workers)
        ends: list[tuple[list[float], list[float]]] = [([], []) for _ in workers]
        free = dict.fromkeys(hosted, 0.0)
        events = [(0.0, worker) for worker in hosted]
        latest = 0.0
        while events:
            now, worker = heapq.heappop(events)
            if free[worker] > now:
                continue
            chosen, lowest = -1, None
            for block in hosted[worker]:
                if following[block] == len(items[block]):
                    continue
                item = items[block][following[block]]
                if lowest is not None and lowest <= item:
                    continue
                _, is_forward, m = item
                if not (first[block] if is_forward else last[block]):
                    source = block - 1 if is_forward else block + 1
                    done = ends[source][is_forward]
                    wait = self._handover if workers[source] != worker else 0.0
                    if m >= len(done) or done[m] + wait > now:
                        continue
                chosen, lowest = block, item
            if lowest is None:
                continue
            _, is_forward, _ = lowest
            end = now + durations[chosen][is_forward]
            following[chosen] += 1
            ends[chosen][is_forward].append(end)
            free[worker] = end
            latest = max(latest, end)
            heapq.heappush(events, (end, worker))
            if not (last[chosen] if is_forward else first[chosen]):
                target = workers[chosen + 1 if is_forward else chosen - 1]
                if target != worker:
                    heapq.heappush(events, (end + self._handover, target))
        return latest
