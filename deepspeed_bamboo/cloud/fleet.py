"""Fleets of spot machines on AWS: their machines, and how many there should be. Needs boto3 only when used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from deepspeed_bamboo.cloud.errors import FleetError
from deepspeed_bamboo.errors import ConfigError


@dataclass(frozen=True)
class SpotInstance:
    """One spot machine of a fleet. ``state`` is EC2's: pending, running, shutting-down, stopping, stopped."""

    instance: str
    zone: str
    instance_type: str
    state: str


class Fleet(Protocol):
    """Some machines that come and go together."""

    def instances(self) -> tuple[SpotInstance, ...]:
        """The spot machines in it, in order of their ids; terminated ones aren't. Raises FleetError."""

    def set_capacity(self, machines: int) -> None:
        """Ask for ``machines`` in all; returns before they exist. Raises FleetError, ConfigError below 0."""


def open_fleet(name: str, *, region: str | None = None, endpoint_url: str | None = None) -> Fleet:
    """The fleet ``name``: ``fleet-...`` is an EC2 Fleet, anything else an Auto Scaling group.

    ``region`` and ``endpoint_url``: as boto3 finds them, unless given. This makes no call to AWS yet.
    Raises FleetError when boto3 is missing or knows no region.
    """
    if name.startswith("fleet-"):
        return Ec2Fleet(name, ec2=ec2_client(region=region, endpoint_url=endpoint_url))
    return AutoScalingGroup(
        name, ec2=_client("ec2", region, endpoint_url), autoscaling=_client("autoscaling", region, endpoint_url)
    )


class AutoScalingGroup:
    """An Auto Scaling group; its machines on demand are left out of :meth:`instances`."""

    def __init__(self, name: str, *, ec2: Any, autoscaling: Any) -> None:
        """``ec2`` and ``autoscaling``: boto3 clients."""
        self._name = name
        self._ec2 = ec2
        self._autoscaling = autoscaling

    def instances(self) -> tuple[SpotInstance, ...]:
        """See :class:`Fleet`."""
        with explained(f"Auto Scaling group {self._name!r}", "listed"):
            groups = self._autoscaling.describe_auto_scaling_groups(AutoScalingGroupNames=[self._name])
            found = groups["AutoScalingGroups"]
            if not found:
                raise FleetError(f"there is no Auto Scaling group {self._name!r} in this region; check name and region")
            return _spot_instances(self._ec2, [member["InstanceId"] for member in found[0]["Instances"]])

    def set_capacity(self, machines: int) -> None:
        """See :class:`Fleet`. The group's own minimum and maximum still bind."""
        _check_capacity(machines)
        with explained(f"Auto Scaling group {self._name!r}", "resized"):
            self._autoscaling.set_desired_capacity(
                AutoScalingGroupName=self._name, DesiredCapacity=machines, HonorCooldown=False
            )


class Ec2Fleet:
    """An EC2 Fleet of type ``maintain``; AWS doesn't resize others."""

    def __init__(self, name: str, *, ec2: Any) -> None:
        """``ec2``: a boto3 client."""
        self._name = name
        self._ec2 = ec2

    def instances(self) -> tuple[SpotInstance, ...]:
        """See :class:`Fleet`."""
        with explained(f"EC2 Fleet {self._name!r}", "listed"):
            members: list[str] = []
            token: dict[str, str] = {}
            while True:
                page = self._ec2.describe_fleet_instances(FleetId=self._name, **token)
                members += [member["InstanceId"] for member in page["ActiveInstances"]]
                if not page.get("NextToken"):
                    return _spot_instances(self._ec2, members)
                token = {"NextToken": page["NextToken"]}

    def set_capacity(self, machines: int, *, ends_surplus: bool = True) -> None:
        """See :class:`Fleet`. Unless it ``ends_surplus``, machines above that stay until AWS takes them."""
        _check_capacity(machines)
        with explained(f"EC2 Fleet {self._name!r}", "resized"):
            self._ec2.modify_fleet(**resizing(self._name, machines, ends_surplus=ends_surplus))


def resizing(fleet: str, machines: int, *, ends_surplus: bool = True) -> dict[str, Any]:
    """The arguments of EC2's ``modify_fleet``. It keeps what is not named, so both are."""
    return {
        "FleetId": fleet,
        "ExcessCapacityTerminationPolicy": "termination" if ends_surplus else "no-termination",
        "TargetCapacitySpecification": {"TotalTargetCapacity": machines},
    }


def _spot_instances(ec2: Any, ids: list[str]) -> tuple[SpotInstance, ...]:
    """Those of ``ids`` that are spot machines. AWS takes 1,000 ids a question; 200 stay well below that."""
    found = []
    for start in range(0, len(ids), 200):
        pages = ec2.get_paginator("describe_instances").paginate(InstanceIds=ids[start : start + 200])
        machines = [machine for page in pages for group in page["Reservations"] for machine in group["Instances"]]
        found += [
            SpotInstance(
                instance=machine["InstanceId"],
                zone=machine["Placement"]["AvailabilityZone"],
                instance_type=machine["InstanceType"],
                state=machine["State"]["Name"],
            )
            for machine in machines
            if machine.get("InstanceLifecycle") == "spot" and machine["State"]["Name"] != "terminated"
        ]
    return tuple(sorted(found, key=lambda machine: machine.instance))


def _check_capacity(machines: int) -> None:
    if isinstance(machines, bool) or not isinstance(machines, int) or machines < 0:
        raise ConfigError(f"a fleet can't have {machines!r} machines; give a whole number from 0 up")


def ec2_client(*, region: str | None = None, endpoint_url: str | None = None) -> Any:
    """A boto3 client of EC2. Raises FleetError when boto3 is missing or knows no region."""
    return _client("ec2", region, endpoint_url)


def _client(service: str, region: str | None, endpoint_url: str | None) -> Any:
    try:
        import boto3
    except ImportError as error:
        raise FleetError(f"fleets need boto3, which can't be imported ({error}); pip install boto3") from error
    with explained(f"service {service!r}", "reached"):
        return boto3.client(service, region_name=region, endpoint_url=endpoint_url)


@contextmanager
def explained(what: str, action: str) -> Iterator[None]:
    """Turn whatever boto3 raises into FleetError."""
    from botocore.exceptions import BotoCoreError, ClientError, NoRegionError

    try:
        yield
    except NoRegionError as error:
        raise FleetError(
            f"{what} can't be {action}, as no AWS region is named here; name that of the fleet: --region NAME, or set "
            "AWS_DEFAULT_REGION"
        ) from error
    except (BotoCoreError, ClientError) as error:
        raise FleetError(
            f"{what} can't be {action} ({error}); check its name, the region and this machine's AWS permissions"
        ) from error
