"""A fleet that follows what a job wants: a fleet of numbers, with jobs as ``ds_bamboo status`` reads them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deepspeed_bamboo.cli.fleet_follow import Follower, end_fleet, follow, iteration_length
from deepspeed_bamboo.cli.fleet_idle import idle_of
from deepspeed_bamboo.cli.followed_job import FollowedJob
from deepspeed_bamboo.cli.job import NoSuchJobError, SeveralJobsError
from deepspeed_bamboo.cli.job_view import JobView
from deepspeed_bamboo.cli.main import main
from deepspeed_bamboo.cli.unattended import Voice
from deepspeed_bamboo.cloud.errors import FleetError, NoSuchFleetError
from deepspeed_bamboo.cloud.fleet_control import FleetControl, FleetMachine, FleetStatus
from deepspeed_bamboo.coordination.errors import CoordinatorUnavailable
from deepspeed_bamboo.core.grid import Grid
from tests.cli.views import view_of
from tests.cloud.test_fleet import EXAMPLE, ec2, spec_for

__all__ = ["ec2"]

GRID = Grid(1, 8)
AWAY = CoordinatorUnavailable(endpoints=["etcd:2379"], tried_seconds=5.0, reason="it is away")


def machine(number: int, state: str = "running") -> FleetMachine:
    address = f"10.0.0.{number}"
    return FleetMachine(f"i-{number}", "g5", "a", state, 0.5, None, address, f"ip-10-0-0-{number}.ec2.internal")


class Fleet(FleetControl):
    """A fleet that keeps what is asked for, and replaces at once what is lost. ``refusals``: instead of answers."""

    def __init__(self, machines: int) -> None:
        super().__init__(None)
        self.wanted, self.state = machines, "active"
        self.ended: list[FleetMachine] = []
        self.running = [machine(number) for number in range(machines)]
        self.asked: list[int] = []
        self.refusals: list[FleetError] = []

    def status(self, name: str, *, priced: bool = True) -> FleetStatus:
        self._refuse()
        return FleetStatus("fleet-1", self.state, self.wanted, (*self.running, *self.ended))

    def resize(self, name: str, machines: int, *, ends_surplus: bool = True) -> None:
        self._refuse()
        assert not ends_surplus
        self.asked.append(machines)
        self.wanted = machines
        self._fill()

    def down(self, name: str) -> str:
        self._refuse()
        self.running = []
        return "fleet-1"

    def lose(self, count: int = 1) -> None:
        for _ in range(count):
            gone = self.running.pop(0)
            self.ended.append(replace(gone, state="terminated"))
        self._fill()

    def _fill(self) -> None:
        while len(self.running) < self.wanted:
            self.running.append(machine(len(self.running) + len(self.ended)))

    def _refuse(self) -> None:
        if self.refusals:
            raise self.refusals.pop(0)


def job_on(fleet: Fleet, *, workers: int = 1, **fields: Any) -> JobView:
    """A job of eight stages on the fleet's machines, so many workers on each."""
    nodes = [f"ip-10-0-0-{one.instance[2:]}" for one in fleet.running]
    names = [f"w{number}" for number in range(max(8, len(nodes) * workers))]
    view = view_of(names, grid=GRID, standbys=len(names) - 8, **fields)
    return replace(view, slots_of={**dict.fromkeys(nodes, workers), **fields.get("slots_of", {})})


class Run:
    """Follows a job over looks a minute apart. Before each look something may happen to the fleet."""

    def __init__(self, fleet: Fleet, *looks: Callable[[], JobView] | JobView | Exception, boot: float = 180.0) -> None:
        self.fleet = fleet
        self.now = 0.0
        self._looks = iter(looks)
        self.follower = Follower(24, boot)
        self.job = FollowedJob(self._look, lambda name: None)

    def follow(self) -> bool:
        return follow(
            self.job,
            self.fleet,
            self.follower,
            name="gpt",
            every_seconds=60.0,
            clock=lambda: self.now,
            sleep=self._sleep,
        )

    def _look(self, name: str | None) -> JobView:
        found = next(self._looks)
        if isinstance(found, Exception):
            raise found
        return found() if callable(found) else found

    def _sleep(self, seconds: float) -> None:
        self.now += seconds


def finished(fleet: Fleet) -> JobView:
    return job_on(fleet, state="finished", agents=0)


def test_it_asks_for_what_is_of_use_and_for_more_while_machines_go(capsys: pytest.CaptureFixture[str]) -> None:
    """Eight stages. One of the machines goes each minute for half an hour, then none for an hour."""
    fleet = Fleet(12)

    def busy() -> JobView:
        fleet.lose()
        return job_on(fleet)

    run = Run(fleet, *[lambda: job_on(fleet)] * 2, *[busy] * 30, *[lambda: job_on(fleet)] * 90, finished(fleet))
    assert run.follow()
    steps = [after - before for before, after in zip(fleet.asked, fleet.asked[1:], strict=False)]
    assert (fleet.asked[0], fleet.asked[-1]) == (8, 8) and 10 < max(fleet.asked) < 16
    assert max(steps) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "job gpt is running"
    assert lines[1] == "fleet gpt: 8 machines in place of 12: 8 machines are of use; all 24 would be 0.0% faster"
    assert "more for those that are missing, each for" in lines[2]
    assert lines[-1] == "job gpt is finished"


def test_one_loss_and_workers_that_start_anew_change_nothing() -> None:
    fleet = Fleet(8)

    def loss() -> JobView:
        fleet.lose()
        return job_on(fleet)

    anew = job_on(fleet, state="starting", slots_of={})
    silent = replace(job_on(fleet), workers=())
    looks: list[Callable[[], JobView] | JobView]
    looks = [job_on(fleet), job_on(fleet), loss, lambda: job_on(fleet), anew, silent, lambda: job_on(fleet)]
    assert Run(fleet, *looks, finished(fleet)).follow()
    assert fleet.asked == []


def test_before_a_job_is_there_and_while_nobody_trains_nothing_is_changed(capsys: pytest.CaptureFixture[str]) -> None:
    fleet = Fleet(12)
    none = NoSuchJobError("no job 'gpt'")
    starting = job_on(fleet, state="starting")
    assert Run(fleet, none, none, starting, AWAY, AWAY, starting, AWAY, none, finished(fleet)).follow()
    assert fleet.asked == []
    lines = capsys.readouterr().out.splitlines()
    trouble = f"{AWAY}; the next look is in 60 s"
    well, there = "etcd and AWS answer again", "job gpt is starting"
    gone = "job gpt is run by nobody that etcd knows of: how it ended is not known; it is not over, so its fleet stays"
    none_yet = "there is no job yet: no job 'gpt'"
    assert lines == [none_yet, there, trouble, well, there, trouble, well, gone, "job gpt is finished"]


def test_an_answer_that_aws_refuses_is_tried_again(capsys: pytest.CaptureFixture[str]) -> None:
    fleet = Fleet(12)

    def refused() -> JobView:
        fleet.refusals = [FleetError("RequestLimitExceeded")]
        return job_on(fleet)

    assert Run(fleet, job_on(fleet), refused, lambda: job_on(fleet), finished(fleet)).follow()
    assert fleet.asked == [8]
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "RequestLimitExceeded; the next look is in 60 s" and lines[2].startswith("fleet gpt: 8 machines")


def test_what_will_be_no_better_ends_it_before_a_job_was_seen_and_not_afterwards() -> None:
    fleet = Fleet(8)
    several = SeveralJobsError("several jobs run there")
    with pytest.raises(SeveralJobsError):
        Run(fleet, NoSuchJobError("none"), several).follow()
    assert Run(fleet, job_on(fleet), several, finished(fleet)).follow()


def test_a_fleet_that_somebody_else_has_changed_is_said_and_put_right(capsys: pytest.CaptureFixture[str]) -> None:
    fleet = Fleet(8)

    def shrunk() -> JobView:
        return job_on(fleet)

    def shrink() -> JobView:
        view = job_on(fleet)
        fleet.wanted = 4
        gone, fleet.running = fleet.running[:4], fleet.running[4:]
        fleet.ended += [replace(one, state="terminated") for one in gone]
        return view

    def modified() -> JobView:
        view = job_on(fleet)
        fleet.wanted, fleet.state = 20, "modifying"
        return view

    def settled() -> JobView:
        fleet.wanted, fleet.state = 8, "active"
        return job_on(fleet)

    run = Run(fleet, job_on(fleet), shrink, shrunk, modified, settled, lambda: job_on(fleet), finished(fleet))
    assert run.follow()
    assert fleet.asked == [8] and run.follower.departures.per_machine_hour == 0.0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "fleet gpt is to have 4 machines, and not 8 as before: somebody else has changed it"
    assert lines[2].startswith("fleet gpt: 8 machines in place of 4: ") and lines[3:] == ["job gpt is finished"]


def test_an_answer_of_aws_that_was_lost_is_nobody_elses_change(capsys: pytest.CaptureFixture[str]) -> None:
    fleet = Fleet(12)
    stock = fleet.resize

    def resize(name: str, machines: int, *, ends_surplus: bool = True) -> None:
        stock(name, machines, ends_surplus=ends_surplus)
        raise FleetError("Read timeout")

    fleet.resize = resize  # type: ignore[method-assign]
    assert Run(fleet, job_on(fleet), job_on(fleet), job_on(fleet), finished(fleet)).follow()
    assert fleet.asked == [8] and "somebody else" not in capsys.readouterr().out


def test_a_fleet_that_is_gone_ends_it_and_one_that_is_not_listed_once_does_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    fleet, gone = Fleet(8), NoSuchFleetError("there is no fleet 'gpt'")

    def goes(times: int) -> JobView:
        view = job_on(fleet)
        fleet.refusals = [gone] * times
        return view

    assert not Run(fleet, lambda: goes(1), lambda: goes(2)).follow()
    assert capsys.readouterr().out.splitlines()[-1] == "fleet gpt is gone, so nothing follows the job any more"
    fleet.refusals = [gone]
    with pytest.raises(NoSuchFleetError):
        Run(fleet).follow()


def test_machines_that_take_no_part_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    fleet = Fleet(8)
    view = job_on(fleet)
    six = replace(view, slots_of=dict.fromkeys(list(view.slots_of)[2:], 1))
    assert Run(fleet, *[six] * 9, view, finished(fleet)).follow()
    named = [line for line in capsys.readouterr().out.splitlines() if "no part" in line]
    assert named == [
        "2 of 8 machines have taken no part in the job for 6 min, and cost as the others do: i-0, i-1; look at "
        "/var/log/cloud-init-output.log there. AWS replaces those that you end in its console"
    ]
    other = replace(view, slots_of=dict.fromkeys("abcdef", 1))
    assert Run(fleet, *[other] * 9, finished(fleet)).follow()
    named = [line for line in capsys.readouterr().out.splitlines() if "no part" in line]
    assert len(named) == 1 and named[0].startswith("2 of 8 ") and "i-0" not in named[0]
    assert Run(fleet, *[NoSuchJobError("none")] * 9, view, finished(fleet)).follow()
    assert "none of 8 running machines is seen in the job for 6 min" in capsys.readouterr().out


def test_a_machine_that_is_young_may_be_on_its_way() -> None:
    fleet = Fleet(6)
    fleet.running[0] = replace(fleet.running[0], hours=0.01)
    status, view = fleet.status("gpt"), job_on(fleet)
    strange = replace(view, slots_of=dict.fromkeys("abcde", 1))
    assert idle_of(status, strange)[0] == 1 and idle_of(status, strange, least_hours=0.1) == (0, [])
    known = replace(view, slots_of=dict.fromkeys(list(view.slots_of)[:5], 1))  # the young one is there
    assert idle_of(status, known, least_hours=0.1) == (1, ["i-5"])
    assert idle_of(status, replace(view, slots_of={}), least_hours=0.1)[0] == 5


@pytest.mark.parametrize("slots", [[4, 4], [4, 1]])
def test_a_machine_counts_for_the_most_workers_that_any_has_had(slots: list[int]) -> None:
    view = view_of([f"w{number}" for number in range(8)], grid=GRID)
    looks = [replace(view, slots_of=dict(zip("ab", counts, strict=True))) for counts in (slots, slots, [8, 1], [1, 1])]
    follower = Follower(12, 180.0)
    wishes = [follower.wish(look, asked=2) for look in looks]
    # None at the first look. A machine that starts anew may be seen with both its old and its new workers once.
    assert [None if wish is None else wish.machines for wish in wishes] == [None, 2, 2, 2]


def test_a_job_gets_a_worker_for_each_stage_also_where_fewer_would_be_as_fast() -> None:
    """What two stages and their shadows take may not fit into a worker's memory."""
    fleet = Fleet(12)
    follower = Follower(12, 180.0, micro_batches=lambda pipelines: 1)
    follower.wish(job_on(fleet), asked=12)
    wish = follower.wish(job_on(fleet), asked=12)
    assert wish is not None and wish.machines == 8
    assert wish.reason.startswith("8 machines hold the stages of the grid without sharing (1 would be as fast)")
    few = Follower(12, 180.0, micro_batches=lambda pipelines: 1, least=2)
    few.wish(job_on(fleet), asked=12)
    wish = few.wish(job_on(fleet), asked=12)
    assert wish is not None and wish.machines == 2 and wish.reason.startswith("2 machines are the least (1 would")


def test_the_end_of_a_fleet_is_tried_until_it_comes(capsys: pytest.CaptureFixture[str]) -> None:
    fleet, waits = Fleet(2), list[float]()
    fleet.refusals = [FleetError("ExpiredToken")] * 3
    end_fleet(fleet, name="gpt", every_seconds=60.0, sleep=waits.append)
    assert waits == [60.0] * 4 and fleet.running == []
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "fleet gpt ends in 60 s; what its command does after its script has so long",
        "fleet gpt may still run, and cost: ExpiredToken; trying again every 60 s",
        "fleet gpt is ending, since the job is over",
    ]
    fleet.refusals = [FleetError("its template can't be removed"), NoSuchFleetError("none")]
    end_fleet(fleet, name="gpt", every_seconds=60.0, sleep=waits.append)
    assert capsys.readouterr().out.splitlines()[-1] == "fleet gpt has ended"


def test_an_output_that_nobody_reads_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed:
        def write(self, text: str) -> int:
            raise BrokenPipeError

        def flush(self) -> None:
            raise BrokenPipeError

    monkeypatch.setattr("sys.stdout", Closed())
    Voice().say("a line")


def test_an_iteration_by_the_engines_plan_and_for_huge_grids_by_the_most_stages() -> None:
    small = [iteration_length(Grid(1, 4), workers=workers, micro_batches=8) for workers in (1, 2, 4, 9)]
    assert small[0] > small[1] > small[2] == small[3]
    assert iteration_length(Grid(64, 16), workers=512, micro_batches=None) == 2 * 3.0 * 64


@pytest.mark.parametrize(
    ("options", "config", "words"),
    [
        ([], None, "the command names none; give --deepspeed_config FILE"),
        (["--endpoints", "etcd:1", "--least", "7"], None, "--least is 7, and the spec's `machines` 6"),
        (["--endpoints", "etcd:x"], None, "'etcd:x'"),
        ([], '{"train_batch_size": 1}', 'has no "bamboo" section that is on'),
        ([], '{"bamboo": {}}', "names none; set coordinator.endpoints in it"),
        ([], '{"bamboo": {"coordinate": 1}}', "unknown key"),
        (
            [],
            '{"bamboo": {"coordinator": {"endpoints": ["e:1"], "username": "u", "password_env": "NO_SUCH"}}}',
            "the environment has no such variable",
        ),
    ],
)
def test_options_that_can_never_work_are_refused_before_aws_is_asked(
    options: list[str], config: str | None, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if config is not None:
        (tmp_path / "ds.json").write_text(config)
        options = ["--deepspeed_config", str(tmp_path / "ds.json")]
    assert main(["fleet", "follow", str(EXAMPLE), *options]) == 1
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--boot-seconds", "1e20", "more than a day"),
        ("--every-seconds", "86401", "more than a day"),
        ("--least", "0", "no whole number from 1"),
        ("--least", "1.5", "no whole number from 1"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(
    option: str, value: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["fleet", "follow", str(EXAMPLE), option, value])
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_ends_it_with_a_word_about_the_fleet(
    ec2: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    spec = spec_for(ec2, region="us-east-1")
    FleetControl(ec2).up(spec)
    (tmp_path / "fleet.json").write_text(spec.model_dump_json())
    monkeypatch.setattr("deepspeed_bamboo.cli.fleet_follow.follow", lambda *_, **__: os.kill(os.getpid(), number))
    monkeypatch.setattr(FleetControl, "check_rights", lambda *_, **__: None)
    ours = signal.signal(number, signal.default_int_handler)  # whoever runs tests may have it ignored (nohup)
    before = signal.getsignal(number)
    code = main(["fleet", "follow", str(tmp_path / "fleet.json"), "--endpoints", "e:2379"])
    assert code == 128 + number and signal.getsignal(number) is before
    signal.signal(number, ours)
    out, err = capsys.readouterr()
    assert "`ds_bamboo fleet down gpt --region us-east-1` ends it" in err
    assert out.splitlines() == [
        "fleet gpt, at most 3 machines, follows the only job at e:2379: a look every 60 s; 180 s to a new machine's "
        "first step; four micro-batches for each stage, as no configuration is named",
        "that etcd asks for no password: whoever reaches it can resize this fleet",
    ]
