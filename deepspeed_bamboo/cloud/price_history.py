"""What AWS has asked for spot machines: its price history as the simulator reads one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from deepspeed_bamboo.cloud.errors import FleetError
from deepspeed_bamboo.cloud.fleet import explained
from deepspeed_bamboo.cloud.fleet_spec import FleetSpec
from deepspeed_bamboo.errors import ConfigError

HEADER = "seconds,dollars_per_hour,zone"
MOST_HOURS = 90 * 24
"""AWS keeps no older prices."""
SYSTEM = "Linux/UNIX"


def price_history(ec2: Any, spec: FleetSpec, *, instance_type: str, hours: float, now: datetime) -> tuple[str, ...]:
    """The lines of a price history of one type in the zones of the fleet's subnets, over the hours before ``now``.

    Raises ConfigError for a type that the fleet has not, and for hours that AWS does not keep; FleetError when AWS
    refuses, or has no price for a zone.
    """
    if instance_type not in spec.instance_types:
        raise ConfigError(f"{instance_type} is no type of fleet {spec.name!r}: it has {', '.join(spec.instance_types)}")
    if not 0 < hours <= MOST_HOURS:
        raise ConfigError(f"AWS keeps the prices of {MOST_HOURS} hours (90 days); got {hours:g}, give a part of these")
    start = now - timedelta(hours=hours)
    with explained(f"prices of {instance_type}", "read"):
        subnets = ec2.describe_subnets(SubnetIds=list(spec.subnets))["Subnets"]
        zones = sorted({subnet["AvailabilityZone"] for subnet in subnets})
        pages = ec2.get_paginator("describe_spot_price_history").paginate(
            InstanceTypes=[instance_type],
            ProductDescriptions=[SYSTEM],
            Filters=[{"Name": "availability-zone", "Values": zones}],
            StartTime=start,
            EndTime=now,
        )
        entries = [entry for page in pages for entry in page["SpotPriceHistory"]]
    return lines_of(entries, zones=zones, start=start)


def lines_of(entries: Iterable[Mapping[str, Any]], *, zones: Sequence[str], start: datetime) -> tuple[str, ...]:
    """From AWS's entries, in any order: of what began before ``start`` the newest counts from then on.

    Raises FleetError for a zone without a price.
    """
    lines, in_order = [HEADER], sorted(entries, key=lambda one: one["Timestamp"])
    for zone in zones:
        its: dict[float, str] = {}
        for entry in in_order:
            if entry["AvailabilityZone"] == zone:
                its[max(0.0, (entry["Timestamp"] - start).total_seconds())] = str(entry["SpotPrice"])
        if not its:
            raise FleetError(f"AWS names no price for {zone}; leave its subnet out, or ask for another type")
        # Where AWS does not say what held at the start, it is what it says first.
        first = min(its)
        lines += [f"{0.0 if at == first else at:.12g},{price},{zone}" for at, price in sorted(its.items())]
    return tuple(lines)
