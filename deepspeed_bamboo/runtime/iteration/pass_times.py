"""Measures what this worker's passes take, by stage: seconds, on a GPU by events that nobody waits for, and memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from deepspeed_bamboo.core.grid import Coordinate

_Event: Any = torch.cuda.Event  # without types
_MEASURED = 4  # micro-batches of an iteration, the first and the last among them
_WEIGHED = 8  # forwards of a stage whose memory is measured: the least of them counts, since the first allocate more
_WARM_UP = 2  # iterations after a change in which passes take longer than later

Sample = tuple[tuple[tuple[int, float, float], ...], float]
"""By stage the seconds of a forward and of a backward, and those from the first pass to the end of the last."""


class PassTimes:
    """Of one worker. Forwards and backwards that belong to an undisturbed iteration count, others don't.

    Args:
        device: the worker's.
        allocated: returns the bytes that tensors take on the device; None where nobody counts them.
    """

    def __init__(self, device: torch.device, *, allocated: Callable[[], int] | None) -> None:
        self._allocated = allocated
        self._kept: dict[int, list[int]] = {}
        self._on_gpu = device.type == "cuda"
        self._begun: list[tuple[int, bool, Any, Any]] = []  # stage, whether it is a forward, from, to
        self._older: list[tuple[int, bool, Any, Any]] = []  # of the iteration before
        self._warm_up = _WARM_UP

    def disturb(self) -> None:
        """What this iteration and the next ones measure says nothing: somebody was lost, or stages moved."""
        self._warm_up = _WARM_UP
        self._begun, self._older, self._kept = [], [], {}

    @property
    def kept_bytes(self) -> Mapping[int, int]:
        """By stage what a forward keeps on the device for its backward, once it is known."""
        return {stage: min(its) for stage, its in self._kept.items() if len(its) == _WEIGHED}

    def wants(self, micro_batch: int, *, of: int) -> bool:
        """Whether passes of ``micro_batch`` count. Events cost the host time, so on a GPU a few in an iteration do."""
        if not self._on_gpu or of <= _MEASURED:
            return True
        return micro_batch in {number * (of - 1) // (_MEASURED - 1) for number in range(_MEASURED)}

    @contextmanager
    def measuring(self, coordinate: Coordinate, *, forward: bool) -> Iterator[None]:
        """A pass of a stage that this worker owns runs inside."""
        start = self._mark()
        with self._weighing(coordinate.stage) if forward and self._allocated is not None else nullcontext():
            yield
        self._begun.append((coordinate.stage, forward, start, self._mark()))

    @contextmanager
    def _weighing(self, stage: int) -> Iterator[None]:
        its = self._kept.setdefault(stage, [])
        if self._allocated is None or len(its) == _WEIGHED:
            yield
            return
        before = self._allocated()
        yield
        its.append(max(0, self._allocated() - before))

    def sample(self) -> Sample | None:
        """Of the iteration that ends now; None after a change. On a GPU of the one before, as far as the device is."""
        begun, self._begun, self._older = self._older if self._on_gpu else self._begun, [], self._begun
        if self._warm_up:
            self._warm_up -= 1
            return None
        if self._on_gpu:
            begun = [one for one in begun if one[3].query()]
        seconds: dict[int, tuple[list[float], list[float]]] = {}
        for stage, forward, start, end in begun:
            seconds.setdefault(stage, ([], []))[forward].append(self._between(start, end))
        passes = tuple(
            (stage, _typical(ahead), _typical(back))
            for stage, (back, ahead) in sorted(seconds.items())
            if back and ahead
        )
        return (passes, self._between(begun[0][2], begun[-1][3])) if passes else None

    def _between(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end) / 1000.0 if self._on_gpu else end - start)

    def _mark(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event: Any = _Event(enable_timing=True)
        event.record()
        return event


def _typical(seconds: list[float]) -> float:
    """Their mean, of several without the longest: a single stall says nothing of the stage or the worker."""
    kept = sorted(seconds)[:-1] if len(seconds) > 2 else seconds
    return sum(kept) / len(kept)
