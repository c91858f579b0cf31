"""Fleets on AWS, against moto: made, resized, shown, ended; what a spec may say; what the command asks first."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError
from moto import mock_aws

from deepspeed_bamboo.cli.job import NoSuchJobError
from deepspeed_bamboo.cli.main import main
from deepspeed_bamboo.cloud.errors import FleetError, NoSuchFleetError
from deepspeed_bamboo.cloud.fleet import open_fleet
from deepspeed_bamboo.cloud.fleet_control import FleetControl
from deepspeed_bamboo.cloud.fleet_spec import (
    FleetSpec,
    creating_calls,
    parse_fleet_spec,
    read_fleet_spec,
    template_name,
    user_data,
)
from deepspeed_bamboo.core.grid import Grid
from deepspeed_bamboo.errors import ConfigError
from tests.cli.views import view_of

EXAMPLE = Path(__file__).parents[2] / "configs" / "fleet" / "aws.json"
IMAGE = "ami-12c6146b"  # one of moto's; to ask for all of them takes seconds


@pytest.fixture
def ec2(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name, value in (("REGION", "us-east-1"), ("ACCESS_KEY_ID", "x"), ("SECRET_ACCESS_KEY", "x")):
        monkeypatch.setenv(f"AWS_{name}" if name != "REGION" else "AWS_DEFAULT_REGION", value)
    with mock_aws():
        yield boto3.client("ec2")


def spec_for(ec2: Any, **changes: Any) -> FleetSpec:
    subnets = [one["SubnetId"] for one in ec2.describe_subnets()["Subnets"]][:2]
    return spec_in(subnets, **changes)


def spec_in(subnets: list[str], **changes: Any) -> FleetSpec:
    known = {"name": "gpt", "machines": 3, "instance_types": ["g5.xlarge", "g4dn.xlarge"], "command": "true"}
    return parse_fleet_spec({**known, "subnets": subnets, "image_id": IMAGE, **changes}, where="here")


class Proxy:
    """moto's client, with what it lacks or is to refuse in its place."""

    def __init__(self, client: Any, **methods: Any) -> None:
        self._client = client
        self._methods = methods

    def __getattr__(self, name: str) -> Any:
        return self._methods.get(name) or getattr(self._client, name)


def test_a_fleet_comes_up_and_goes(ec2: Any) -> None:
    control = FleetControl(ec2)
    fleet = control.up(spec_for(ec2))
    status = control.status("gpt")
    assert (status.fleet, status.wanted, status.running) == (fleet, 3, 3)
    assert {machine.state for machine in status.machines} == {"running"}
    assert [machine.instance for machine in open_fleet(fleet).instances()] == [one.instance for one in status.machines]
    assert control.down("gpt") == fleet
    assert ec2.describe_launch_templates()["LaunchTemplates"] == []
    with pytest.raises(FleetError, match="there is no fleet 'gpt'"):
        control.status("gpt")


def test_a_fleet_that_lives_is_resized_and_not_made_again(ec2: Any) -> None:
    resized: list[dict[str, Any]] = []
    # moto has no modify_fleet.
    control = FleetControl(Proxy(ec2, modify_fleet=lambda **arguments: resized.append(arguments) or {"Return": True}))
    fleet = control.up(spec_for(ec2))
    assert control.up(spec_for(ec2, machines=5)) == fleet
    control.resize("gpt", 2)
    assert [one["FleetId"] for one in resized] == [fleet] * 2
    assert [one["TargetCapacitySpecification"]["TotalTargetCapacity"] for one in resized] == [5, 2]
    # Also where `follow` has said otherwise before: AWS keeps what is not named.
    assert [one["ExcessCapacityTerminationPolicy"] for one in resized] == ["termination"] * 2
    assert len(ec2.describe_fleets()["Fleets"]) == 1


def test_fleets_of_other_names_are_left_alone(ec2: Any) -> None:
    control = FleetControl(ec2)
    control.up(spec_for(ec2))
    control.up(spec_for(ec2, name="bert", machines=1))
    control.down("gpt")
    assert control.status("bert").running == 1
    assert [one["LaunchTemplateName"] for one in ec2.describe_launch_templates()["LaunchTemplates"]] == [
        template_name("bert")
    ]


def test_cost_so_far_is_hours_times_price(ec2: Any) -> None:
    control = FleetControl(ec2, now=lambda: datetime.now(timezone.utc) + timedelta(hours=10))
    control.up(spec_for(ec2))
    status = control.status("gpt")
    prices = [machine.dollars_per_hour for machine in status.machines]
    assert all(prices)
    assert status.dollars_per_hour == pytest.approx(sum(price or 0 for price in prices))
    assert status.dollars_so_far == pytest.approx(10 * status.dollars_per_hour, rel=0.01)


def test_a_refused_fleet_leaves_no_template_behind(ec2: Any) -> None:
    def refuse(**_: object) -> Any:
        return ec2.describe_subnets(SubnetIds=["subnet-0000000000000000f"])  # an error of AWS's

    with pytest.raises(FleetError, match="fleet 'gpt' can't be made"):
        FleetControl(Proxy(ec2, create_fleet=refuse)).up(spec_for(ec2))
    assert ec2.describe_launch_templates()["LaunchTemplates"] == []


def said(code: str) -> Any:
    """A call that AWS answers so."""

    def call(**_: object) -> Any:
        raise ClientError({"Error": {"Code": code, "Message": "m"}}, "call")

    return call


def test_rights_are_tried_before_they_are_needed_and_nothing_is_done(ec2: Any) -> None:
    names = ("modify_fleet", "delete_fleets", "delete_launch_template")
    FleetControl(ec2).up(spec_for(ec2))
    asked: list[dict[str, Any]] = []

    def allow(**arguments: Any) -> Any:
        asked.append(arguments)
        said("DryRunOperation")()

    allowed = dict.fromkeys(names, allow)
    FleetControl(Proxy(ec2, **allowed)).check_rights("gpt", down=True)
    assert len(asked) == 3 and all(one["DryRun"] for one in asked)
    for name in names:
        control = FleetControl(Proxy(ec2, **{**allowed, name: said("UnauthorizedOperation")}))
        with pytest.raises(FleetError, match=f"can't be changed by {name} .*UnauthorizedOperation"):
            control.check_rights("gpt", down=True)
    only = Proxy(ec2, **{**allowed, "delete_fleets": said("UnauthorizedOperation")})
    FleetControl(only).check_rights("gpt", down=False)
    with pytest.raises(NoSuchFleetError):
        FleetControl(only).check_rights("bert", down=False)


def test_what_stands_in_for_aws_is_not_asked_for_a_trial(ec2: Any) -> None:
    FleetControl(ec2).up(spec_for(ec2))
    elsewhere = boto3.client("ec2", endpoint_url="http://127.0.0.1:9").meta
    control = FleetControl(Proxy(ec2, meta=elsewhere, delete_fleets=said("InternalError")))
    control.check_rights("gpt", down=True)


def test_status_names_the_machines_that_take_no_part_in_the_job(
    ec2: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    FleetControl(ec2).up(spec_for(ec2))
    machines = FleetControl(ec2).status("gpt", priced=False).machines
    assert all(one.address and one.host.startswith("ip-") and one.dollars_per_hour is None for one in machines)
    first, second, third = machines
    view = replace(view_of(["w0"], grid=Grid(1, 1)), slots_of={first.host: 1, "named": 1})
    view = replace(view, workers=(replace(view.workers[0], node="named", address=second.address),))
    monkeypatch.setattr("deepspeed_bamboo.cli.fleet._view", lambda *_: view)
    asked = ["fleet", "status", "gpt", "--endpoints", "e:2379"]
    assert main(asked) == 0
    assert "no part" not in capsys.readouterr().out  # so young a machine may be on its way
    monkeypatch.setattr("deepspeed_bamboo.cli.fleet._BOOT_HOURS", 0.0)
    assert main(asked) == 0
    shown = capsys.readouterr().out
    assert f"1 of 3 machines have taken no part in the job, and cost as the others do: {third.instance};" in shown
    assert main([*asked, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["without_part"], told["perhaps_without_part"]) == (1, [third.instance])

    def none(*_: object) -> Any:
        raise NoSuchJobError("no job")

    monkeypatch.setattr("deepspeed_bamboo.cli.fleet._view", none)
    assert main(asked) == 0
    assert "none of 3 running machines is seen in the job, and" in capsys.readouterr().out


def test_every_resource_is_tagged_and_spot_only() -> None:
    template, fleet = creating_calls(spec_in(["subnet-1", "subnet-2"], max_dollars_per_machine_hour=0.5))
    for call in (template, fleet):
        assert call.arguments["TagSpecifications"][0]["Tags"][0] == {"Key": "deepspeed_bamboo-fleet", "Value": "gpt"}
    capacity = fleet.arguments["TargetCapacitySpecification"]
    assert (capacity["SpotTargetCapacity"], capacity["OnDemandTargetCapacity"]) == (3, 0)
    overrides = fleet.arguments["LaunchTemplateConfigs"][0]["Overrides"]
    assert len(overrides) == 4 and {one["MaxPrice"] for one in overrides} == {"0.5"}
    assert fleet.arguments["SpotOptions"]["AllocationStrategy"] == "capacity-optimized"


def test_the_start_script_repeats_while_machines_are_wanting(tmp_path: Path) -> None:
    count = tmp_path / "count"
    command = f'echo "$WORD" >>{count}; [ $(wc -l <{count}) -ge 3 ] && exit 0; exit 75'
    script = user_data(spec_in(["subnet-1"], command=command, directory=str(tmp_path), environment={"WORD": "a b'c"}))
    stubs = 'sleep() { :; }\nds_bamboo() { shift 2; "$@"; }\n'
    done = subprocess.run(["bash", "-c", stubs + script], timeout=20, check=True)
    assert done.returncode == 0
    assert count.read_text().splitlines() == ["a b'c"] * 3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"machines": 0}, "fleet.machines"),
        ({"name": "a b"}, "fleet.name"),
        ({"instance_types": []}, "fleet.instance_types"),
        ({"max_dollars_per_machine_hour": float("inf")}, "fleet.max_dollars_per_machine_hour"),
        (
            {"max_dollars_per_hour": 0.5},
            "unknown key fleet.max_dollars_per_hour; did you mean 'max_dollars_per_machine_hour'",
        ),
        ({"machine": 3}, "unknown key fleet.machine; did you mean 'machines'"),
        ({"environment": {"a-b": "c"}}, "fleet.environment"),
        ({"command": "x" * 20_000}, "more than 16384 bytes"),
        ({"command": ""}, "fleet.command: '' names nothing; write what is meant"),
        ({"image_id": " "}, "fleet.image_id: ' ' names nothing"),
        ({"instance_types": ["g5.xlarge", ""]}, "fleet.instance_types: '' names nothing"),
        ({"region": ""}, "fleet.region: '' names nothing"),
        ({"directory": "relative"}, "fleet.directory: 'relative' is no absolute path"),
        ({"directory": ""}, "fleet.directory: '' is no absolute path"),
        ({"machines": True}, "fleet.machines: True must be a valid integer"),
        ({"disk_gigabytes": "100"}, "fleet.disk_gigabytes: '100' must be a valid integer"),
        ({"max_dollars_per_machine_hour": True}, "fleet.max_dollars_per_machine_hour: True must be a valid number"),
        ({"environment": {"PATH": "/opt/venv/bin:$PATH"}}, "PATH is '/opt/venv/bin:$PATH', but values are taken as"),
        ({"environment": {"A": "b", "WHERE": "~/data"}}, "WHERE is '~/data', but"),
        ({"environment": {"NOW": "$(date)"}}, "NOW is '$(date)', but"),
    ],
)
def test_what_is_wrong_with_a_spec_is_named(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        spec_in(["subnet-1"], **change)
    assert words in str(caught.value)


def test_numbers_and_texts_as_they_are_written_are_taken() -> None:
    spec = spec_in(["subnet-1"], max_dollars_per_machine_hour=1, environment={"PRICE": "5$ a~b", "EMPTY": ""})
    assert (spec.max_dollars_per_machine_hour, spec.environment["PRICE"]) == (1, "5$ a~b")


def test_a_key_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "fleet.json"
    path.write_text(EXAMPLE.read_text().replace('"machines": 6,', '"machines": 6, "machines": 60,'))
    with pytest.raises(ConfigError, match="'machines' is there more than once in one object, and only one can count"):
        read_fleet_spec(path)


def test_a_dry_run_prints_every_call_and_makes_none(ec2: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fleet", "up", str(EXAMPLE), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "the fleet costs $3.60 an hour at most (6 machines of $0.6)" in shown
    assert "ec2.create_launch_template" in shown and "ec2.create_fleet" in shown
    assert f"ds_bamboo run -- bash -c '{read_fleet_spec(EXAMPLE).command}'" in shown  # the start script as text
    assert "where a fleet gpt lives already, `up` makes none of these calls: by modify_fleet" in shown
    assert ec2.describe_fleets()["Fleets"] == []


def test_the_command_asks_before_it_spends_or_ends(
    ec2: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "fleet.json"
    path.write_text(spec_for(ec2).model_dump_json())
    assert main(["fleet", "up", str(path)]) == 1
    assert "add --yes" in capsys.readouterr().err
    assert ec2.describe_fleets()["Fleets"] == []
    assert main(["fleet", "up", str(path), "--yes"]) == 0
    capsys.readouterr()
    assert main(["fleet", "status", "gpt", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["running"] == 3
    assert main(["fleet", "status", "gpt"]) == 0
    shown = capsys.readouterr().out
    assert (
        "3 of 3 machines" in shown and "so far, at today's spot prices, and without machines that ended more" in shown
    )
    assert all(one.instance in shown for one in FleetControl(ec2).status("gpt").machines), "no id is cut"
    assert main(["fleet", "down", "gpt"]) == 1
    assert FleetControl(ec2).status("gpt").running == 3
    assert main(["fleet", "down", "gpt", "--yes"]) == 0
    assert main(["fleet", "status", "gpt"]) == 1


def test_commands_are_printed_with_the_region_that_the_fleet_is_in(
    ec2: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "fleet.json"
    path.write_text(spec_for(ec2, region="us-east-1").model_dump_json())
    for name in ("AWS_DEFAULT_REGION", "AWS_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)
    assert main(["fleet", "up", str(path), "--yes"]) == 0
    shown = capsys.readouterr().out
    assert "each machine may cost up to its on-demand price, until `ds_bamboo fleet down gpt" in shown
    for command in ("status gpt --region us-east-1", "down gpt --region us-east-1"):
        assert f"`ds_bamboo fleet {command}`" in shown
    assert main(["fleet", "down", "gpt", "--yes"]) == 1
    assert "name that of the fleet: --region NAME" in capsys.readouterr().err
    assert main(["fleet", "down", "gpt", "--yes", "--region", "eu-west-1"]) == 1
    assert "check its name, or give its region: --region NAME" in capsys.readouterr().err
    assert main(["fleet", "down", "gpt", "--yes", "--region", "us-east-1"]) == 0
    capsys.readouterr()
    assert main(["fleet", "up", str(EXAMPLE), "--dry-run", "--region", "eu-west-1"]) == 0
    assert "--region eu-west-1` ends it" in capsys.readouterr().out
