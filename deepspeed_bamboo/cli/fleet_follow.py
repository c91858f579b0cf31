"""``ds_bamboo fleet follow``: asks for as many machines as a running job can use, until the job is over."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from deepspeed_bamboo.cli.fleet_idle import idle_line, idle_of
from deepspeed_bamboo.cli.followed_job import FollowedJob, lasts
from deepspeed_bamboo.cli.job_view import JobView
from deepspeed_bamboo.cli.unattended import Voice
from deepspeed_bamboo.cloud.errors import FleetError, NoSuchFleetError
from deepspeed_bamboo.cloud.fleet_control import FleetControl, FleetStatus
from deepspeed_bamboo.core.grid import Grid
from deepspeed_bamboo.core.presence import Departures, Idle
from deepspeed_bamboo.core.timing import Profile
from deepspeed_bamboo.core.wanting import Wanted, missing_share, modest, wanted_machines
from deepspeed_bamboo.errors import BambooError
from deepspeed_bamboo.sim.planned import MOST_PASSES, PlannedGrid

__all__ = ["Follower", "end_fleet", "follow", "iteration_length"]

_LEAST = 2
_MICRO_BATCHES_PER_STAGE = 4
_IDLE_BOOTS = 2.0  # the time of so many boots, until a machine that takes no part is named


@dataclass
class Follower:
    """What was seen of a fleet's machines and their job, and what the job wants by that.

    Attributes:
        most: machines that may be asked for.
        boot_seconds: from a loss to its replacement's first step.
        micro_batches: of each pipeline and step, by the number of pipelines; None: four for each stage.
        least: machines that are wanted in any case; None: one worker for each stage of each pipeline, since what fewer
            have to hold may not fit into their memory, and two, since with one a loss ends the job.
        departures: of the fleet's machines.
        idle: machines that take no part.
    """

    most: int
    boot_seconds: float
    micro_batches: Callable[[int], int | None] = field(default=lambda pipelines: None)
    least: int | None = None
    departures: Departures = field(default_factory=Departures, init=False)
    idle: Idle = field(init=False)
    _each: int = field(default=0, init=False)
    _each_before: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.idle = Idle(_IDLE_BOOTS * self.boot_seconds)

    def saw(self, status: FleetStatus, *, seconds: float) -> None:
        """Take note of the fleet's machines at that moment, of any clock that only advances."""
        running = [machine.instance for machine in status.machines if machine.runs]
        ended = [machine.instance for machine in status.machines if not machine.runs]
        self.departures = self.departures.look(seconds, running=running, ended=ended)

    def wish(self, view: JobView, *, asked: int) -> Wanted | None:
        """What ``view`` wants of a fleet of ``asked`` machines; None while nobody trains, and at the first look."""
        each = self._workers_of_a_machine(view)
        if view.grid is None or view.state != "running" or not each:
            return None
        grid = Grid(*view.grid)
        micro_batches = self.micro_batches(grid.pipelines)
        wish = wanted_machines(
            lambda machines: iteration_length(grid, workers=machines * each, micro_batches=micro_batches),
            most=self.most,
            missing=missing_share(
                losses_per_machine_hour=self.departures.per_machine_hour, boot_seconds=self.boot_seconds
            ),
            least=max(_LEAST, -(-len(grid) // each)) if self.least is None else self.least,
            why_least="hold the stages of the grid without sharing" if self.least is None else "are the least",
        )
        return modest(wish, asked=asked)

    def _workers_of_a_machine(self, view: JobView) -> int:
        """The most that any had. A machine that starts has fewer; one that starts anew may have twice as many once."""
        before, self._each_before = self._each_before, max(view.slots_of.values(), default=0)
        self._each = max(self._each, min(before, self._each_before))
        return self._each


class _Following:
    """One look after the other at a fleet and its job."""

    def __init__(self, job: FollowedJob, control: FleetControl, follower: Follower, *, name: str) -> None:
        self._job = job
        self._control = control
        self._follower = follower
        self._name = name
        self._asked = control.status(name, priced=False).wanted
        self._tried: int | None = None
        self._idle_said: tuple[str, ...] = ()
        self.voice = Voice()

    def look(self, seconds: float) -> bool:
        """Look once, and resize the fleet. Returns whether the job is over. Raises BambooError for what prevents it."""
        status = self._control.status(self._name, priced=False)
        self._compare(status)
        self._follower.saw(status, seconds=seconds)
        found = self._job.look()
        if found.over:
            self.voice.say(found.line)
            return True
        self._name_idle(status, found.view, seconds=seconds)
        if found.view is not None and status.state != "modifying":
            self._resize(found.view)
        self.voice.condition(found.line)
        return False

    def _compare(self, status: FleetStatus) -> None:
        """Say it where the fleet is not what this command made of it."""
        if status.state == "modifying" or status.wanted == self._asked:
            return
        if status.wanted != self._tried:  # which AWS may have done without an answer
            self.voice.say(
                f"fleet {self._name} is to have {status.wanted} machines, and not {self._asked} as before: somebody "
                "else has changed it"
            )
            self._follower.departures = self._follower.departures.shrunk(self._asked - status.wanted)
        self._asked = status.wanted

    def _resize(self, view: JobView) -> None:
        wish = self._follower.wish(view, asked=self._asked)
        if wish is None or wish.machines == self._asked:
            return
        self._tried = wish.machines
        self._control.resize(self._name, wish.machines, ends_surplus=False)
        self.voice.say(f"fleet {self._name}: {wish.machines} machines in place of {self._asked}: {wish.reason}")
        self._asked = wish.machines

    def _name_idle(self, status: FleetStatus, view: JobView | None, *, seconds: float) -> None:
        count, candidates = idle_of(status, view)
        self._follower.idle = idle = self._follower.idle.look(seconds, candidates)
        long = idle.long(seconds)
        count, before, self._idle_said = min(count, len(long)), self._idle_said, tuple(long)
        if long and self._idle_said != before:
            since = f" for {idle.seconds(seconds) / 60.0:.0f} min"
            self.voice.say(idle_line(count, long, status, since=since))


def follow(
    job: FollowedJob,
    control: FleetControl,
    follower: Follower,
    *,
    name: str,
    every_seconds: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Resize the fleet ``name`` whenever the job's wish changes. Returns when the job is over, or the fleet gone.

    Args:
        job: to look at.
        control: of the fleet. Raises FleetError at once where there is no such fleet.
        follower: what the job wants.
        name: of the fleet.
        every_seconds: between two looks.
        clock: seconds that only advance.
        sleep: waits for so many seconds.

    Returns whether the fleet is still there. Where etcd or AWS does not answer, a line says so, and the next look
    tries again; raises what will be no better then, as long as the job was not seen.
    """
    following, unlisted = _Following(job, control, follower, name=name), False
    again = f"the next look is in {every_seconds:g} s"
    while True:
        try:
            if following.look(clock()):
                return True
            unlisted = False
        except NoSuchFleetError as error:
            if unlisted:
                following.voice.say(f"fleet {name} is gone, so nothing follows the job any more")
                return False
            unlisted = True
            following.voice.condition(f"{error}; {again}", trouble=True)
        except BambooError as error:
            if lasts(error) and not job.lived:
                raise
            following.voice.condition(f"{error}; {again}", trouble=True)
        sleep(every_seconds)


def end_fleet(
    control: FleetControl, *, name: str, every_seconds: float, sleep: Callable[[float], None] = time.sleep
) -> None:
    """End the fleet of a job that is over, however long AWS does not let it; first wait once, see below."""
    voice = Voice()
    voice.say(f"fleet {name} ends in {every_seconds:g} s; what its command does after its script has so long")
    sleep(every_seconds)
    while True:
        try:
            control.down(name)
        except NoSuchFleetError:
            voice.say(f"fleet {name} has ended")
            return
        except FleetError as error:
            voice.condition(f"fleet {name} may still run, and cost: {error}; trying again every {every_seconds:g} s")
            sleep(every_seconds)
        else:
            voice.say(f"fleet {name} is ending, since the job is over")
            return


def iteration_length(grid: Grid, *, workers: int, micro_batches: int | None) -> float:
    """Of an iteration with so many workers, in forwards of a stage; all stages count as alike.

    By the engine's own plan. Where that would take seconds to make, the worker with the most stages decides.
    """
    each = _MICRO_BATCHES_PER_STAGE * grid.stages if micro_batches is None else micro_batches
    if 2 * len(grid) * each > MOST_PASSES:
        return 3.0 * each * -(-len(grid) // workers)
    return PlannedGrid(grid, Profile.even(grid.stages), each, protected=False).shape(workers).seconds
