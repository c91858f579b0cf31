"""``ds_bamboo fleet follow``: asks for as many machines as a running job can use, until the job is over."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from deepspeed_bamboo.cli.job import NoSuchJobError
from deepspeed_bamboo.cli.job_view import JobView
from deepspeed_bamboo.cloud.fleet_control import FleetControl
from deepspeed_bamboo.core.availability import Availability
from deepspeed_bamboo.core.grid import Grid
from deepspeed_bamboo.core.timing import Profile
from deepspeed_bamboo.core.wanting import Wanted, missing_share, wanted_machines
from deepspeed_bamboo.errors import BambooError
from deepspeed_bamboo.sim.planned import MOST_PASSES, PlannedGrid

__all__ = ["Follower", "follow", "iteration_length"]

_LEAST = 2
"""With one machine a loss ends the job."""
_MICRO_BATCHES_PER_STAGE = 4
_THERE = ("active", "standby", "joining", "leaving")


def follow(
    follower: Follower,
    control: FleetControl,
    *,
    name: str,
    view: Callable[[], JobView],
    every_seconds: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Resize the fleet ``name`` whenever the job's wish changes; return when the job is over.

    Args:
        follower: what the job wants.
        control: of the fleet. Raises FleetError at once where there is no such fleet.
        name: of the fleet.
        view: reads the job. Raises NoSuchJobError where there is none: before the job is seen it has yet to start,
            and afterwards it is over.
        every_seconds: between two looks.
        clock: seconds that only advance.
        sleep: waits for so many seconds.

    Where etcd or AWS does not answer, a line says so, and the next look tries again.
    """
    asked, said = control.status(name).wanted, ""
    while True:
        line = ""
        try:
            seen = view()
            if seen.over:
                print(f"job {seen.job} is {seen.state}", flush=True)
                return
            wish = follower.wish(seen, seconds=clock())
            if wish is not None and wish.machines != asked:
                control.resize(name, wish.machines, ends_surplus=False)
                line = f"fleet {name}: {wish.machines} machines in place of {asked}: {wish.reason}"
                asked = wish.machines
        except NoSuchJobError as error:
            if follower.seen:
                print(f"the job is over: {error}", flush=True)
                return
            line = f"there is no job yet: {error}"
        except BambooError as error:
            line = f"{error}; the next look is in {every_seconds:g} s"
        if line and line != said:
            print(line, flush=True)
            said = line
        sleep(every_seconds)


@dataclass
class Follower:
    """What was seen of a job's machines, and what the job wants by that.

    Attributes:
        most: machines that may be asked for.
        boot_seconds: from a loss to its replacement's first step.
        interval_seconds: in which losses are counted.
        micro_batches: of each pipeline and step; None: four for each stage.
        seen: whether there was a job.
    """

    most: int
    boot_seconds: float
    interval_seconds: float
    micro_batches: int | None = None
    seen: bool = field(default=False, init=False)
    _there: frozenset[str] | None = field(default=None, init=False)
    _availability: Availability = field(init=False)

    def __post_init__(self) -> None:
        self._availability = Availability(interval_seconds=self.interval_seconds)

    def wish(self, view: JobView, *, seconds: float) -> Wanted | None:
        """What ``view`` wants at that moment, of any clock that only advances; None while nobody trains."""
        self.seen = True
        workers = [worker for worker in view.workers if worker.state in _THERE]
        there = frozenset(worker.node for worker in workers)
        self._count(there, seconds)
        if view.grid is None or not there or view.state != "running":
            return None
        grid, each = Grid(*view.grid), max(1, round(len(workers) / len(there)))
        per_hour = 3600.0 * self._availability.losses_per_second / len(there)
        return wanted_machines(
            lambda machines: iteration_length(grid, workers=machines * each, micro_batches=self.micro_batches),
            most=self.most,
            missing=missing_share(losses_per_machine_hour=per_hour, boot_seconds=self.boot_seconds),
            least=_LEAST,
        )

    def _count(self, there: frozenset[str], seconds: float) -> None:
        before, self._there = self._there, there
        self._availability = self._availability.at(seconds)
        if before is not None and there != before:
            self._availability = self._availability.changed(seconds, gone=len(before - there))


def iteration_length(grid: Grid, *, workers: int, micro_batches: int | None) -> float:
    """Of an iteration with so many workers, in forwards of a stage; all stages count as alike.

    By the engine's own plan. Where that would take seconds to make, the worker with the most stages decides.
    """
    each = _MICRO_BATCHES_PER_STAGE * grid.stages if micro_batches is None else micro_batches
    if 2 * len(grid) * each > MOST_PASSES:
        return 3.0 * each * -(-len(grid) // workers)
    return PlannedGrid(grid, Profile.even(grid.stages), each, protected=False).shape(workers).seconds
