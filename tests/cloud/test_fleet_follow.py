"""A fleet that follows what a job wants: against moto, with jobs as ``ds_bamboo status`` reads them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from deepspeed_bamboo.cli.fleet_follow import Follower, follow, iteration_length
from deepspeed_bamboo.cli.job import NoSuchJobError
from deepspeed_bamboo.cli.job_view import JobView
from deepspeed_bamboo.cloud.errors import FleetError
from deepspeed_bamboo.cloud.fleet_control import FleetControl
from deepspeed_bamboo.coordination.errors import CoordinatorUnavailable
from deepspeed_bamboo.core.grid import Grid
from tests.cli.views import view_of
from tests.cloud.test_fleet import Proxy, ec2, spec_for

__all__ = ["ec2"]

GRID = Grid(1, 8)


def job(count: int, *, gone: int = 0, **fields: Any) -> JobView:
    """A job of eight stages on ``count`` machines, of which the first ``gone`` ones were replaced by others."""
    view = view_of([f"w{number + gone}" for number in range(count)], grid=GRID, standbys=max(0, count - 8), **fields)
    return replace(view, workers=tuple(replace(one, node=f"node of {one.worker}") for one in view.workers))


class Followed:
    """A fleet of 12 machines that follows what ``looks`` see, a minute apart."""

    def __init__(self, ec2: Any, *looks: JobView | Exception) -> None:
        self.asked: list[dict[str, Any]] = []
        self.now = 0.0
        client = Proxy(ec2, modify_fleet=lambda **arguments: self.asked.append(arguments) or {"Return": True})
        self.control = FleetControl(client)
        self.control.up(spec_for(ec2, machines=12))
        self._looks = iter(looks)
        self._follower = Follower(most=12, boot_seconds=180.0, interval_seconds=60.0)

    def run(self) -> list[int]:
        """What was asked for, in turn."""
        follow(
            self._follower,
            self.control,
            name="gpt",
            view=self._look,
            every_seconds=60.0,
            clock=lambda: self.now,
            sleep=self._sleep,
        )
        assert all(one["ExcessCapacityTerminationPolicy"] == "no-termination" for one in self.asked)
        return [one["TargetCapacitySpecification"]["TotalTargetCapacity"] for one in self.asked]

    def _look(self) -> JobView:
        found = next(self._looks)
        if isinstance(found, Exception):
            raise found
        return found

    def _sleep(self, seconds: float) -> None:
        self.now += seconds


def test_it_asks_for_what_is_of_use_and_for_more_while_machines_go(
    ec2: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Eight stages. Then one of nine machines goes each minute, then none for an hour."""
    busy = [job(9, gone=minute) for minute in range(20)]
    quiet = [job(9, gone=19)] * 80
    asked = Followed(ec2, job(9), *busy, *quiet, job(9, state="finished")).run()
    assert (asked[0], asked[-1]) == (8, 8) and max(asked) > 10
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "fleet gpt: 8 machines in place of 12: 8 machines are of use; all 12 would be 0.0% faster"
    assert "more for those that are missing, each for" in lines[1]
    assert lines[-1] == "job gpt is finished"


def test_before_a_job_is_there_and_while_nobody_trains_nothing_is_changed(
    ec2: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    none = NoSuchJobError("no job 'gpt'")
    away = CoordinatorUnavailable(endpoints=["etcd:2379"], tried_seconds=5.0, reason="it is away")
    looks = [none, none, job(2, state="starting"), away, none]
    assert Followed(ec2, *looks).run() == []
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "there is no job yet: no job 'gpt'"
    assert lines[1].endswith("; the next look is in 60 s") and lines[2] == "the job is over: no job 'gpt'"
    assert len(lines) == 3


def test_an_answer_that_aws_refuses_is_tried_again(ec2: Any, capsys: pytest.CaptureFixture[str]) -> None:
    followed = Followed(ec2, job(8), job(8), job(8, state="failed"))
    stock, refusals = followed.control.resize, iter([FleetError("RequestLimitExceeded")])

    def resize(name: str, machines: int, *, ends_surplus: bool = True) -> None:
        if (refusal := next(refusals, None)) is not None:
            raise refusal
        stock(name, machines, ends_surplus=ends_surplus)

    followed.control.resize = resize  # type: ignore[method-assign]
    assert followed.run() == [8]
    assert capsys.readouterr().out.startswith("RequestLimitExceeded; the next look is in 60 s\nfleet gpt: 8 machines")


def test_a_fleet_that_is_not_there_is_said_at_once(ec2: Any) -> None:
    with pytest.raises(FleetError, match="there is no fleet 'gpt'"):
        follow(Follower(4, 1.0, 1.0), FleetControl(ec2), name="gpt", view=lambda: job(2), every_seconds=1.0)


def test_several_workers_of_a_machine_count_together() -> None:
    view = view_of([f"w{number}" for number in range(8)], grid=GRID)  # four on a machine
    wish = Follower(12, 180.0, 60.0).wish(view, seconds=0.0)
    assert wish is not None and wish.machines == 2


def test_an_iteration_by_the_engines_plan_and_for_huge_grids_by_the_most_stages() -> None:
    small = [iteration_length(Grid(1, 4), workers=workers, micro_batches=8) for workers in (1, 2, 4, 9)]
    assert small[0] > small[1] > small[2] == small[3]
    assert iteration_length(Grid(64, 16), workers=512, micro_batches=None) == 2 * 3.0 * 64
