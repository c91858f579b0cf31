"""AWS's spot prices as a price history of the simulator: by the call, against moto, and by what AWS may answer."""

from __future__ import annotations

import random
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto import mock_aws

from deepspeed_bamboo.cli.main import main
from deepspeed_bamboo.cloud.errors import FleetError
from deepspeed_bamboo.cloud.fleet_spec import parse_fleet_spec
from deepspeed_bamboo.cloud.price_history import HEADER, lines_of
from deepspeed_bamboo.sim.prices import ZonedPrices, read_prices

START = datetime(2026, 11, 30, 12, tzinfo=timezone.utc)
TYPES = ["g5.xlarge", "g4dn.xlarge"]


def entry(zone: str, *, after_seconds: float, price: str) -> dict[str, Any]:
    return {"AvailabilityZone": zone, "Timestamp": START + timedelta(seconds=after_seconds), "SpotPrice": price}


def read(tmp_path: Path, lines: tuple[str, ...]) -> ZonedPrices:
    path = tmp_path / "prices.csv"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    found = read_prices(path)
    assert isinstance(found, ZonedPrices)
    return found


def test_the_newest_price_from_before_holds_at_the_start(tmp_path: Path) -> None:
    entries = [
        entry("a", after_seconds=-900, price="0.50"),
        entry("a", after_seconds=-60, price="0.60"),
        entry("a", after_seconds=1800, price="0.70"),
        entry("b", after_seconds=600.5, price="0.40"),
        entry("c", after_seconds=0, price="9.00"),
    ]
    random.Random(1).shuffle(entries)
    prices = read(tmp_path, lines_of(entries, zones=["a", "b"], start=START))
    assert [prices.at(at * 1000, "a") for at in (0, 1799, 1800)] == [0.6, 0.6, 0.7]
    assert [prices.at(at * 1000, "b") for at in (0, 3600)] == [0.4, 0.4]
    assert [zone for zone, _ in prices.zones] == ["a", "b"]


def test_a_zone_without_a_price_is_named() -> None:
    with pytest.raises(FleetError, match="AWS names no price for b; leave its subnet out"):
        lines_of([entry("a", after_seconds=0, price="1")], zones=["a", "b"], start=START)


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Of a fleet in two zones."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    with mock_aws():
        subnets = [
            one["SubnetId"] for one in boto3.client("ec2", region_name="us-east-1").describe_subnets()["Subnets"]
        ]
        known = {"name": "gpt", "machines": 3, "instance_types": TYPES, "command": "true", "region": "us-east-1"}
        made = parse_fleet_spec({**known, "subnets": subnets[:2], "image_id": "ami-1"}, where="here")
        path = tmp_path / "fleet.json"
        path.write_text(made.model_dump_json(), encoding="utf-8")
        yield path


def test_the_command_prints_what_the_simulator_reads(
    spec: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for kind in ([], ["--type", "g4dn.xlarge"]):
        assert main(["fleet", "prices", str(spec), *kind, "--hours", "2"]) == 0
        lines = tuple(capsys.readouterr().out.splitlines())
        assert lines[0] == HEADER
        prices = read(tmp_path, lines)
        assert len(prices.zones) == 2
        assert all(prices.at(0, zone) > 0.0 for zone, _ in prices.zones)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--type", "p3.2xlarge"], "p3.2xlarge is no type of fleet 'gpt': it has g5.xlarge, g4dn.xlarge"),
        (["--hours", "0"], "AWS keeps the prices of 2160 hours (90 days); got 0"),
        (["--hours", "nan"], "got nan"),
    ],
)
def test_what_can_not_be_asked_for_is_named(
    spec: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert main(["fleet", "prices", str(spec), *arguments]) != 0
    assert words in capsys.readouterr().err
