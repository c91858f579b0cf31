"""``ds_bamboo fleet follow`` as a command, over a real etcd and EC2 as moto plays it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deepspeed_bamboo.cli.main import main
from deepspeed_bamboo.cloud.errors import FleetError
from deepspeed_bamboo.cloud.fleet_control import FleetControl, FleetStatus
from deepspeed_bamboo.coordination.etcd import EtcdStore
from deepspeed_bamboo.coordination.job import JobCoordinator
from deepspeed_bamboo.coordination.records import AgentRecord, JobFailure
from deepspeed_bamboo.coordination.server import PrivateEtcd
from tests.cloud.test_fleet import ec2, spec_for
from tests.coordination.helpers import first_epoch

__all__ = ["ec2"]


class Happening:
    """What happens, one thing before each look."""

    def __init__(self, things: list[Callable[[], None]]) -> None:
        self._things = iter(things)
        self._status = FleetControl.status

    def status(self, control: FleetControl, name: str, *, priced: bool = True) -> FleetStatus:
        next(self._things)()
        return self._status(control, name, priced=priced)


class Job:
    """Of two machines, which may fail, start again, and be complete."""

    def __init__(self, store: EtcdStore, name: str) -> None:
        self.coordinator = JobCoordinator(store, job=name)
        self._agents: list[Any] = []

    def start(self) -> None:
        with self.coordinator.claim_name(lease_seconds=60):
            self._agents = [
                self.coordinator.register_agent(AgentRecord(rank, f"n{rank}", 1), lease_seconds=60) for rank in (0, 1)
            ]
        self.coordinator.propose(first_epoch(["a", "b"]), expected=None)

    def fail(self) -> None:
        self.coordinator.fail(JobFailure("a", "fatal_loss", "both copies are lost", ""))
        self._end()

    def finish(self) -> None:
        self.coordinator.finish({"step": 9})
        self._end()

    def _end(self) -> None:
        for agent in self._agents:
            agent.withdraw()
        self.coordinator.clean_up()


def test_a_fleet_ends_with_its_job_and_not_before(
    ec2: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = spec_for(ec2, machines=2, region="us-east-1")
    FleetControl(ec2).up(spec)
    path = tmp_path / "fleet.json"
    path.write_text(spec.model_dump_json())
    monkeypatch.setattr(FleetControl, "check_rights", lambda *_, **__: None)  # moto takes a trial for the deed
    stock, refusals = FleetControl.down, iter([FleetError("ExpiredToken")])

    def down(control: FleetControl, name: str) -> str:
        for refusal in refusals:
            raise refusal
        return stock(control, name)

    monkeypatch.setattr(FleetControl, "down", down)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with PrivateEtcd() as etcd, contextlib.closing(EtcdStore([etcd.endpoint])) as store:
        job, other = Job(store, "gpt"), Job(store, "other")
        job.start()
        job.finish()  # an earlier one
        things = [lambda: None, lambda: None, job.start, other.start, job.fail, job.start, lambda: None, job.finish]
        happening = Happening(things)
        monkeypatch.setattr(FleetControl, "status", lambda *args, **named: happening.status(*args, **named))
        options = ["--every-seconds", "0.01", "--down", "--endpoints", str(etcd.endpoint)]
        assert main(["fleet", "follow", str(path), *options]) == 0
        other.finish()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("fleet gpt, at most 2 machines, follows the only job at ") and "no password" in lines[1]
    assert lines[2].startswith("there is no job yet: no job at ")
    assert lines[3:] == [
        "job gpt is running",
        "job gpt is run by nobody that etcd knows of: both copies are lost; it is not over, so its fleet stays",
        "job gpt is running",
        "job gpt is finished",
        "fleet gpt ends in 0.01 s; what its command does after its script has so long",
        "fleet gpt may still run, and cost: ExpiredToken; trying again every 0.01 s",
        "fleet gpt is ending, since the job is over",
    ]
    (fleet,) = ec2.describe_fleets()["Fleets"]
    assert fleet["FleetState"].startswith("deleted")
