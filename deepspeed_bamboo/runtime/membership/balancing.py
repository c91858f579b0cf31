"""What this job has measured of its stages and workers, and when that is a reason to share the work differently.

Every worker reports how long its passes took, in the agreement of an iteration. So all know the same, and the
reporter decides.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from deepspeed.utils import logger

from deepspeed_bamboo.coordination import CoordinatorUnavailable, EpochRecord
from deepspeed_bamboo.core.measuring import Iteration, Measured
from deepspeed_bamboo.core.placement import Placement, WorkerId
from deepspeed_bamboo.core.placing.holding import MeasuredMemory, Memory
from deepspeed_bamboo.core.slowness import DATA, SCRIPT, Cause, Delays
from deepspeed_bamboo.core.timing import Profile, iteration_seconds, slowest_seconds, with_handover
from deepspeed_bamboo.runtime.iteration.pass_times import PassTimes
from deepspeed_bamboo.runtime.iteration.worker import Worker
from deepspeed_bamboo.runtime.job.news import tell_once
from deepspeed_bamboo.runtime.membership.device_memory import DeviceMemory

_PASSES, _BESIDE, _MEMORY = "passes", "beside", "device_memory"
_BUSY_WITH = {DATA: "reading its data", SCRIPT: "in its script, between two calls of the engine"}
_DRAIN_SECONDS = 60.0
_SPANS = 3  # iterations of a placement that are timed as a whole
_MOST_PASSES = 5_000  # in an iteration, for its time to be simulated on the way


class Balancing:
    """One worker's view of it.

    Args:
        worker: whose placement counts.
        times: what this worker measures of its passes.
        beside: returns what this worker was busy with besides since it was asked last, in seconds.
        device_memory: measures what this worker's stages take.
    """

    def __init__(
        self,
        worker: Worker,
        *,
        times: PassTimes,
        beside: Callable[[], Mapping[Cause, float]],
        device_memory: DeviceMemory,
    ) -> None:
        self._worker = worker
        self._times = times
        self._beside = beside
        self._device_memory = device_memory
        self._measured = Measured()
        self._memory = MeasuredMemory()
        self._delays = Delays()
        self._drained: set[WorkerId] = set()  # of which this worker has asked that
        self._asking = threading.Thread()
        self._placement: Placement | None = None
        self._timed: Placement | None = None  # the placement of which spans are
        self._spans: list[float] = []
        self._explained = False  # whether the handover is known by them
        self._handover: float | None = None
        self._looked_at: tuple[Any, ...] | None = None
        self._written: tuple[Mapping[WorkerId, float], float | None] | None = None

    @property
    def profile(self) -> Profile | None:
        """What is measured, once every stage is."""
        profile = self._measured.profile(self._worker.grid.stages)
        return profile if profile is None or self._handover is None else replace(profile, handover=self._handover)

    @property
    def memory(self) -> Memory | None:
        """What stages take on devices, and how much room there is; None until it is known, and on CPUs."""
        return self._memory.of(self._worker.grid.stages, members=self._worker.record.members)

    @property
    def slow_workers(self) -> Mapping[WorkerId, float]:
        """The workers that are slow, and their speeds: 1 is as fast as before."""
        return self._measured.speeds

    @property
    def _simulated(self) -> bool:
        """Whether an iteration is small enough to be simulated now and then."""
        return bool(2 * len(self._worker.grid) * self._worker.micro_batches <= _MOST_PASSES)

    def seconds_of(self, placement: Placement) -> float | None:
        """Of all passes of an iteration with any placement; None before stages are measured, or if that takes long."""
        profile = self.profile
        if profile is None or not self._simulated:
            return None
        return iteration_seconds(placement, profile, micro_batches=self._worker.micro_batches)

    def to_json(self) -> dict[str, Any]:
        """What a worker that joins has to know, since it may be the next one that decides where stages go."""
        return {
            "stages": {str(stage): list(passes) for stage, passes in self._measured.stages.items()},
            "handover": self._handover,
        }

    def take(self, value: Mapping[str, Any]) -> None:
        """Inverse of :meth:`to_json`."""
        stages = {
            int(stage): (float(forward), float(backward)) for stage, (forward, backward) in value["stages"].items()
        }
        self._measured = replace(self._measured, stages=stages)
        self._handover = value["handover"]

    def is_due(self, record: EpochRecord) -> bool:
        """Whether something has changed since the last call: who takes part, or what is known."""
        known = self._handover is not None or (self.profile is not None and not self._simulated)
        now = (record.number, known, tuple(sorted(self._measured.speeds)))
        due, self._looked_at = now != self._looked_at, now
        return due

    def contribution(self) -> dict[str, Any]:
        """What this worker contributes to the agreement of an iteration."""
        placement = self._worker.placement
        if placement is not self._placement:
            self._placement = placement
            self._times.disturb()
        sample = self._times.sample()
        beside = self._beside()
        if sample is None:
            return {}
        memory = self._device_memory.measured()
        return {_PASSES: sample, _BESIDE: beside, **({} if memory is None else {_MEMORY: memory})}

    def note(self, agreed: Mapping[WorkerId, Mapping[str, Any]]) -> None:
        """At the end of an iteration: take in what all have handed in, the same on every worker."""
        samples = {
            worker: {stage: (forward, backward) for stage, forward, backward in value[_PASSES][0]}
            for worker, value in sorted(agreed.items())
            if value.get(_PASSES)
        }
        if not samples:
            return
        self._note_memory({w: agreed[w][_MEMORY] for w in samples if agreed[w].get(_MEMORY)})
        span = max(value[_PASSES][1] for value in agreed.values() if value.get(_PASSES))
        self._note_span(span)
        iteration = Iteration(span, self._worker.micro_batches, self._predicted)
        before = self._measured.speeds
        self._measured = self._measured.after(samples, members=agreed.keys(), iteration=iteration)
        self._tell_changes(before, self._measured.speeds)
        beside = {worker: agreed[worker][_BESIDE] for worker in samples}
        named = self._delays.found
        self._delays = self._delays.after(beside, passes_seconds=span, members=agreed.keys())
        self._tell_delays(named, self._delays.found)
        self._drain_slow_workers()
        self._write()

    def _note_memory(self, seen: Mapping[WorkerId, Mapping[str, Any]]) -> None:
        if not seen:
            return
        worker, before = self._worker, self.memory
        self._memory = self._memory.after(seen, worker.placement, micro_batches=worker.micro_batches)
        if self.memory is not None and self.memory != before and self._worker.is_reporter:
            self._worker.log_event("memory", **self.memory.to_json())

    def _predicted(self, worker: WorkerId, speed: float) -> float:
        """How many seconds an iteration takes longer if ``worker`` has that ``speed``; 0 if nothing is known."""
        profile, placement = self.profile, self._worker.placement
        if profile is None:
            return 0.0
        slowed, micro_batches = replace(profile, speeds={**profile.speeds, worker: speed}), self._worker.micro_batches
        if self._simulated:
            usual, longer = (iteration_seconds(placement, p, micro_batches=micro_batches) for p in (profile, slowed))
        else:
            usual, longer = (slowest_seconds(placement, p) * micro_batches for p in (profile, slowed))
        return longer - usual

    def _note_span(self, seconds: float) -> None:
        """What all passes of an iteration have taken: once it is known of a placement, it shows what messages cost."""
        placement = self._worker.placement
        if placement is not self._timed:
            self._timed, self._spans, self._explained = placement, [], False
        if self._explained:
            return
        # Who has joined may know the times of all stages only later than the first spans: so the last ones count.
        self._spans = [*self._spans[1 - _SPANS :], seconds]
        profile = self._measured.profile(self._worker.grid.stages)
        if len(self._spans) == _SPANS and profile is not None and self._simulated and not profile.speeds:
            self._explained = True
            self._handover = with_handover(
                profile, placement, micro_batches=self._worker.micro_batches, seconds=median(self._spans)
            ).handover

    def _tell_changes(self, before: Mapping[WorkerId, float], now: Mapping[WorkerId, float]) -> None:
        for worker in sorted(now.keys() - before.keys()):
            why = f"worker {worker} is slow: its passes take {1.0 / now[worker]:.1f} times as long as before"
            self._tell(why, worker=worker, cause="passes", speed=now[worker])
        for worker in sorted(before.keys() - now.keys()):
            self._tell(f"worker {worker} is as fast as before", worker=worker, cause="passes", over=True)

    def _tell_delays(
        self, before: Mapping[tuple[WorkerId, Cause], float], now: Mapping[tuple[WorkerId, Cause], float]
    ) -> None:
        """What no other placement would help against, so nothing is moved or drained for it."""
        for worker, cause in sorted(now.keys() - before.keys()):
            why = (
                f"worker {worker} keeps the others waiting, and not by its passes: it is {_BUSY_WITH[cause]} for "
                f"{now[worker, cause]:.1f} times as long as the passes of an iteration take, longer than the others"
            )
            self._tell(why, worker=worker, cause=cause)
        for worker, cause in sorted(before.keys() - now.keys()):
            self._tell(
                f"worker {worker} is no longer {_BUSY_WITH[cause]} for long", worker=worker, cause=cause, over=True
            )

    def _tell(self, reason: str, **fields: Any) -> None:
        """On the console, and as an event, which ``ds_bamboo status`` shows."""
        tell_once(self._worker, reason)
        if self._worker.is_reporter:
            self._worker.log_event("slow_worker", reason=reason, **fields)

    def _drain_slow_workers(self) -> None:
        """As the reporter: ask for it, if the job is to have it so. Training does not wait for an outage of etcd to
        end; after a later iteration this asks again."""
        if not self._worker.is_reporter or self._worker.session.config.topology.slow_workers != "drain":
            return
        slow = sorted(self._measured.speeds.keys() - self._drained)
        if slow and not self._asking.is_alive():
            self._asking = threading.Thread(
                target=self._ask_to_drain, args=(slow,), name="bamboo-draining", daemon=True
            )
            self._asking.start()

    def _ask_to_drain(self, workers: Iterable[WorkerId]) -> None:
        session = self._worker.session
        for worker in workers:
            member = session.present.get(worker)
            if member is None or member.node in session.draining:
                continue
            reason = f"worker {worker} is slow"
            with contextlib.suppress(CoordinatorUnavailable):
                session.coordinator.request_drain(member.node, deadline_seconds=_DRAIN_SECONDS, reason=reason)
                self._drained.add(worker)

    def _write(self) -> None:
        """As the reporter: keep the profile where ``bamboo.profile`` says, and in the event log."""
        profile = self.profile
        if profile is None or not self._worker.is_reporter:
            return
        known = (dict(profile.speeds), self._handover)
        if self._written == known:
            return
        self._written = known
        grid, placement = self._worker.grid, self._worker.placement
        batch = {"pipelines": grid.pipelines, "micro_batches": self._worker.micro_batches, "copies": placement.copies}
        # With one pipeline nobody asks whether pipelines have each other's state.
        alike = {"alike": placement.alike} if grid.pipelines > 1 else {}
        self._worker.log_event("profile", **profile.to_json(), **batch, **alike)
        path = self._worker.session.config.profile
        if path is None:
            return
        partial = Path(f"{path}.{os.getpid()}")
        try:
            partial.write_text(json.dumps(profile.to_json()) + "\n", encoding="utf-8")
            partial.replace(path)
        except OSError as error:  # What can't be written ends nothing.
            logger.warning(f"bamboo.profile {path!r} can't be written: {error.strerror}")
