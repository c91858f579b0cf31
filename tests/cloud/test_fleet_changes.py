"""A fleet that lives: what of it can be changed, what a smaller one loses, why it is small, what it costs."""

from __future__ import annotations

import base64
import copy
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deepspeed_bamboo.cli.main import main
from deepspeed_bamboo.cloud.errors import FleetError
from deepspeed_bamboo.cloud.fleet_changes import differences
from deepspeed_bamboo.cloud.fleet_control import FleetControl, FleetMachine, FleetStatus
from deepspeed_bamboo.cloud.fleet_spec import FleetSpec, creating_calls, parse_fleet_spec, user_data
from tests.cloud.test_fleet import IMAGE, Proxy, ec2, spec_for, spec_in

__all__ = ["ec2"]

SUBNETS = ["subnet-1", "subnet-2"]
NOW = datetime(2026, 11, 30, 12, tzinfo=timezone.utc)


def described(spec: FleetSpec) -> tuple[dict[str, Any], dict[str, Any]]:
    """A fleet of that spec and the data of its template, as EC2 has them."""
    template, fleet = creating_calls(spec, root_device="/dev/xvda", since_seconds=1_764_000_000.0)
    return copy.deepcopy(fleet.arguments), copy.deepcopy(template.arguments["LaunchTemplateData"])


@pytest.mark.parametrize(
    "extras", [{}, {"security_groups": ["sg-1", "sg-2"], "key_name": "k", "instance_profile": "p"}]
)
def test_a_fleet_of_another_size_is_no_other_fleet(extras: dict[str, Any]) -> None:
    fleet, template = described(spec_in(SUBNETS, machines=3, max_dollars_per_machine_hour=0.5, **extras))
    fleet["LaunchTemplateConfigs"][0]["Overrides"].reverse()
    for one in fleet["LaunchTemplateConfigs"][0]["Overrides"]:
        one["MaxPrice"] = "0.50"
    spec = spec_in(SUBNETS[::-1], machines=19, max_dollars_per_machine_hour=0.5, **extras)
    assert differences(spec, fleet=fleet, template=template) == ()


def test_a_fleet_made_before_start_scripts_had_its_name_can_be_resized() -> None:
    """And one with a price of more digits than EC2 is told."""
    spec = spec_in(SUBNETS, max_dollars_per_machine_hour=0.123456789)
    fleet, template = described(spec)
    script = base64.b64decode(template["UserData"]).decode()
    before = "".join(line for line in script.splitlines(keepends=True) if not line.startswith("export BAMBOO_"))
    template["UserData"] = base64.b64encode(before.encode()).decode()
    assert before != script and differences(spec, fleet=fleet, template=template) == ()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_dollars_per_machine_hour": 0.6}, "max_dollars_per_machine_hour (0.5; in the spec 0.6)"),
        ({"max_dollars_per_machine_hour": None}, "max_dollars_per_machine_hour (0.5; in the spec none)"),
        ({"instance_types": ["g5.xlarge"]}, "instance_types (g4dn.xlarge, g5.xlarge; in the spec g5.xlarge)"),
        ({"subnets": ["subnet-3"]}, "subnets (subnet-1, subnet-2; in the spec subnet-3)"),
        ({"image_id": "ami-2"}, f"image_id ({IMAGE}; in the spec ami-2)"),
        ({"security_groups": ["sg-9"]}, "security_groups (none; in the spec sg-9)"),
        ({"instance_profile": "p"}, "instance_profile (none; in the spec p)"),
        ({"key_name": "k"}, "key_name (none; in the spec k)"),
        ({"disk_gigabytes": 200}, "disk_gigabytes (100; in the spec 200)"),
        ({"command": "false"}, "the start script (command, directory or environment)"),
        ({"environment": {"A": "b"}}, "the start script (command, directory or environment)"),
    ],
)
def test_whatever_else_differs_is_named(change: dict[str, Any], words: str) -> None:
    spec = spec_in(SUBNETS, max_dollars_per_machine_hour=0.5)
    fleet, template = described(spec)
    changed = parse_fleet_spec({**spec.model_dump(), **change}, where="here")
    assert differences(changed, fleet=fleet, template=template) == (words,)


def test_a_fleet_that_lives_is_not_said_to_be_what_it_is_not(ec2: Any) -> None:
    asked: list[dict[str, Any]] = []
    control = FleetControl(Proxy(ec2, modify_fleet=lambda **arguments: asked.append(arguments) or {"Return": True}))
    control.up(spec_for(ec2, max_dollars_per_machine_hour=3))
    with pytest.raises(FleetError, match=r"max_dollars_per_machine_hour \(3; in the spec 0\.6\).*fleet down gpt"):
        control.up(spec_for(ec2, max_dollars_per_machine_hour=0.6))
    assert asked == []
    control.up(spec_for(ec2, max_dollars_per_machine_hour=3, machines=2), ends_surplus=False)
    assert [one["ExcessCapacityTerminationPolicy"] for one in asked] == ["no-termination"]


def test_before_machines_are_ended_it_says_how_many(
    ec2: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []
    client = Proxy(ec2, modify_fleet=lambda **arguments: asked.append(arguments) or {"Return": True})
    monkeypatch.setattr("deepspeed_bamboo.cli.fleet.ec2_client", lambda **_: client)
    FleetControl(client).up(spec_for(ec2, machines=5, max_dollars_per_machine_hour=2))
    path = tmp_path / "fleet.json"
    path.write_text(spec_for(ec2, machines=2, max_dollars_per_machine_hour=2).model_dump_json())
    assert main(["fleet", "up", str(path), "--yes"]) == 0
    shown = capsys.readouterr().out
    assert "5 machines run, and 5 were asked for until now; AWS ends 3 of them at once" in shown
    assert "$4.00 an hour at most (2 machines of $2)" in shown
    assert main(["fleet", "up", str(path), "--yes", "--keep-surplus"]) == 0
    shown = capsys.readouterr().out
    assert "3 of them are above 2: they run on" in shown and "$10.00 an hour at most (5 machines of $2)" in shown
    assert [one["ExcessCapacityTerminationPolicy"] for one in asked] == ["termination", "no-termination"]


def test_the_disk_is_the_images_root_and_goes_with_its_machine(ec2: Any) -> None:
    made: list[dict[str, Any]] = []

    def make(**arguments: Any) -> Any:
        made.append(arguments)
        return ec2.create_launch_template(**arguments)

    images = {"Images": [{"RootDeviceName": "/dev/xvda"}]}
    client = Proxy(ec2, create_launch_template=make, describe_images=lambda **_: images)
    FleetControl(client, now=lambda: NOW).up(spec_for(ec2))
    data = made[0]["LaunchTemplateData"]
    (disk,) = data["BlockDeviceMappings"]
    assert disk["DeviceName"] == "/dev/xvda" and disk["Ebs"]["DeleteOnTermination"] is True
    script = base64.b64decode(data["UserData"]).decode()
    assert f"export BAMBOO_SINCE={NOW.timestamp():.0f}\n" in script and "export BAMBOO_FLEET=gpt\n" in script


def test_an_image_that_is_not_there_is_refused_before_anything_is_made(ec2: Any) -> None:
    with pytest.raises(FleetError, match=r"there is no image 'ami-12c6146b' with a root disk in this region"):
        FleetControl(Proxy(ec2, describe_images=lambda **_: {"Images": []})).up(spec_for(ec2))
    assert ec2.describe_launch_templates()["LaunchTemplates"] == []


def test_the_specs_own_variables_come_last() -> None:
    lines = user_data(spec_in(SUBNETS, environment={"BAMBOO_FLEET": "", "A": "b"}), since_seconds=7.4).splitlines()
    assert [line for line in lines if line.startswith("export")] == [
        "export BAMBOO_FLEET=''",
        "export BAMBOO_SINCE=7",
        "export A=b",
    ]


def record(kind: str, what: str, text: str, *, minute: int) -> dict[str, Any]:
    information = {"EventSubType": what, "EventDescription": text}
    return {"EventType": kind, "Timestamp": NOW + timedelta(minutes=minute), "EventInformation": information}


def test_why_machines_are_missing_is_awss_last_word() -> None:
    pages = [
        [record("service-error", "spotInstanceCountLimitExceeded", "16 vCPUs", minute=2)],
        [
            record("fleet-change", "launchSpecUnusable", "price too low", minute=3),
            record("instance-change", "launched", "i-1", minute=4),
        ],
    ]
    asked: list[str | None] = []

    def history(*, FleetId: str, StartTime: datetime, NextToken: str | None = None) -> Any:  # noqa: N803
        assert (FleetId, StartTime) == ("fleet-1", NOW - timedelta(hours=1))
        asked.append(NextToken)
        return {"HistoryRecords": pages[len(asked) - 1], **({"NextToken": "more"} if len(asked) < len(pages) else {})}

    status = FleetStatus("fleet-1", "active", 6, ())
    control = FleetControl(SimpleNamespace(describe_fleet_history=history), now=lambda: NOW)
    assert control.why_missing(status) == "launchSpecUnusable: price too low" and asked == [None, "more"]
    quiet = SimpleNamespace(
        describe_fleet_history=lambda **_: {"HistoryRecords": [record("fleet-change", "active", "", minute=1)]}
    )
    assert FleetControl(quiet, now=lambda: NOW).why_missing(status) is None


def test_the_command_says_why_machines_are_missing(
    ec2: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    records = {"HistoryRecords": [record("service-error", "spotInstanceCountLimitExceeded", "16 vCPUs", minute=0)]}
    client = Proxy(ec2, describe_fleet_history=lambda **_: records)
    monkeypatch.setattr("deepspeed_bamboo.cli.fleet.ec2_client", lambda **_: client)
    FleetControl(client).up(spec_for(ec2))
    assert main(["fleet", "status", "gpt"]) == 0
    assert "AWS says" not in capsys.readouterr().out
    ec2.terminate_instances(InstanceIds=[FleetControl(client).status("gpt").machines[0].instance])
    assert main(["fleet", "status", "gpt"]) == 0
    assert "machines are missing; AWS says: spotInstanceCountLimitExceeded: 16 vCPUs" in capsys.readouterr().out


def test_prices_are_those_of_linux_on_all_pages(ec2: Any) -> None:
    asked: list[dict[str, Any]] = []

    def price(zone: str, dollars: str) -> dict[str, Any]:
        return {"InstanceType": "g5.xlarge", "AvailabilityZone": zone, "SpotPrice": dollars, "Timestamp": NOW}

    def paginate(**arguments: Any) -> Any:
        asked.append(arguments)
        return [{"SpotPriceHistory": [price("a", "1.5")]}, {"SpotPriceHistory": [price("b", "2.5")]}]

    client = SimpleNamespace(get_paginator=lambda _: SimpleNamespace(paginate=paginate))
    prices = FleetControl(client, now=lambda: NOW)._prices({"g5.xlarge"})
    assert prices == {("g5.xlarge", "a"): 1.5, ("g5.xlarge", "b"): 2.5}
    assert [one["ProductDescriptions"] for one in asked] == [["Linux/UNIX"]]


def test_machines_without_a_price_are_said_to_be_left_out() -> None:
    from deepspeed_bamboo.cli.fleet import _unpriced

    def machine(name: str, dollars: float | None, *, state: str = "running") -> FleetMachine:
        return FleetMachine(name, "g5.xlarge", "a", state, 2.0, dollars)

    status = FleetStatus(
        "f", "active", 3, (machine("i-1", 1.5), machine("i-2", None), machine("i-3", 1.0, state="gone"))
    )
    assert (status.dollars_per_hour, status.without_price, status.running) == (1.5, 1, 2)
    assert _unpriced(status) == ", without 1 machines for which AWS names no price"
