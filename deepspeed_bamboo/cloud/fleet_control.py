"""Makes, shows and ends fleets of spot machines on AWS; what they are is in :mod:`fleet_spec`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any

from deepspeed_bamboo.cloud.errors import FleetError, NoSuchFleetError
from deepspeed_bamboo.cloud.fleet import Ec2Fleet, explained, resizing
from deepspeed_bamboo.cloud.fleet_changes import differences
from deepspeed_bamboo.cloud.fleet_spec import TAG, Call, FleetSpec, creating_calls, template_name
from deepspeed_bamboo.cloud.price_history import SYSTEM

_LIVE = ("submitted", "active", "modifying")
_HISTORY = timedelta(hours=1)
_COMPLAINTS = ("service-error", "error", "information")
_HINDRANCES = (
    "launchSpecUnusable",
    "launchSpecTemporarilyBlacklisted",
    "allLaunchSpecsTemporarilyBlacklisted",
    "spotInstanceCountLimitExceeded",
    "fleetProgressHalted",
)
_AWS = (".amazonaws.com", ".api.aws")  # in every address of its services


@dataclass(frozen=True)
class FleetMachine:
    """One machine.

    ``dollars_per_hour``: its zone's and type's spot price now; None where AWS names none, or nobody asked.
    ``address``: its private one; ``host``: the name that goes with it. Both are empty once it has ended.
    """

    instance: str
    instance_type: str
    zone: str
    state: str
    hours: float
    dollars_per_hour: float | None
    address: str = ""
    host: str = ""

    @property
    def runs(self) -> bool:
        """Whether EC2 calls it pending or running."""
        return self.state in ("pending", "running")

    @property
    def names(self) -> frozenset[str]:
        """What a job may call it: programs name their machine with and without its domain."""
        return frozenset({self.instance, self.address, self.host, self.host.partition(".")[0]} - {""})


@dataclass(frozen=True)
class FleetStatus:
    """A fleet and its machines, ended ones included as long as EC2 shows them (about an hour)."""

    fleet: str
    state: str
    wanted: int
    machines: tuple[FleetMachine, ...]

    @property
    def running(self) -> int:
        """Machines that EC2 calls pending or running."""
        return sum(machine.runs for machine in self.machines)

    @property
    def dollars_per_hour(self) -> float:
        """What the running machines cost at today's prices, without those of unknown price."""
        return sum(machine.dollars_per_hour or 0.0 for machine in self.machines if machine.runs)

    @property
    def without_price(self) -> int:
        """Machines for which AWS names no price."""
        return sum(machine.dollars_per_hour is None for machine in self.machines)

    @property
    def dollars_so_far(self) -> float:
        """What all listed machines have cost, at today's prices, without those that EC2 no longer lists.

        Those of unknown price don't count.
        """
        return sum(machine.hours * (machine.dollars_per_hour or 0.0) for machine in self.machines)


@contextmanager
def _trial() -> Iterator[None]:
    """Pass over how AWS says that a call would have been allowed."""
    from botocore.exceptions import ClientError

    try:
        yield
    except ClientError as error:
        if error.response["Error"]["Code"] != "DryRunOperation":
            raise


def _now() -> datetime:
    return datetime.now(timezone.utc)


class FleetControl:
    """Fleets by name. ``ec2``: a boto3 client; ``now``: the time, with its zone."""

    def __init__(self, ec2: Any, *, now: Callable[[], datetime] = _now) -> None:
        self._ec2 = ec2
        self._now = now

    def calls_up(self, spec: FleetSpec, *, ends_surplus: bool = True) -> tuple[Call, ...]:
        """The calls that :meth:`up` would make: they create the fleet, or resize one that exists.

        Raises FleetError, also where one exists that differs from the spec in more than its size.
        """
        fleet = self._find(spec.name)
        if fleet is None:
            root, now = self._root_device(spec.image_id), self._now().timestamp()
            return creating_calls(spec, root_device=root, since_seconds=now)
        others = differences(spec, fleet=fleet, template=self._template(spec.name))
        if others:
            raise FleetError(
                f"fleet {spec.name!r} lives, and has others than its spec: {'; '.join(others)}. Only `machines` can be "
                f"changed while it lives: take the rest back in the spec, or end it first, with all its machines "
                f"(ds_bamboo fleet down {spec.name})"
            )
        return (Call("modify_fleet", resizing(fleet["FleetId"], spec.machines, ends_surplus=ends_surplus)),)

    def up(self, spec: FleetSpec, *, ends_surplus: bool = True) -> str:
        """Make the fleet, or resize it if one of that name lives. Returns its id.

        Unless it ``ends_surplus``, machines above the spec's number stay until AWS takes them. Raises FleetError; a
        launch template that was made for a fleet which AWS then refused is removed again.
        """
        calls = self.calls_up(spec, ends_surplus=ends_surplus)
        if calls[0].method == "create_launch_template":
            self._remove_template(spec.name)  # of a fleet that ended without ``down``
        answer: Any = {}
        try:
            with explained(f"fleet {spec.name!r}", "made"):
                for call in calls:
                    answer = getattr(self._ec2, call.method)(**call.arguments)
        except FleetError:
            if len(calls) > 1:
                self._remove_template(spec.name)
            raise
        refused = [error.get("ErrorMessage", "no reason given") for error in answer.get("Errors") or ()]
        if refused and "FleetId" not in answer:
            raise FleetError(
                f"fleet {spec.name!r} can't be made ({'; '.join(refused)}); correct the spec, or ask elsewhere"
            )
        return str(answer.get("FleetId") or calls[0].arguments["FleetId"])

    def status(self, name: str, *, priced: bool = True) -> FleetStatus:
        """The fleet ``name`` and its machines, with what they cost if ``priced``. Raises FleetError, see _required."""
        fleet = self._required(name)
        with explained(f"fleet {name!r}", "listed"):
            pages = self._ec2.get_paginator("describe_instances").paginate(
                Filters=[{"Name": f"tag:{TAG}", "Values": [name]}]
            )
            found = [one for page in pages for group in page["Reservations"] for one in group["Instances"]]
            prices = self._prices({one["InstanceType"] for one in found}) if priced else {}
        machines = tuple(sorted((self._machine(one, prices) for one in found), key=lambda one: one.instance))
        wanted = int(fleet["TargetCapacitySpecification"]["TotalTargetCapacity"])
        return FleetStatus(fleet["FleetId"], fleet["FleetState"], wanted, machines)

    def why_missing(self, status: FleetStatus) -> str | None:
        """AWS's last word of this hour about machines that it did not start; None where it has said nothing."""
        token: dict[str, str] = {}
        records: list[Any] = []
        try:
            with explained(f"the history of {status.fleet}", "read"):
                while True:
                    page = self._ec2.describe_fleet_history(
                        FleetId=status.fleet, StartTime=self._now() - _HISTORY, **token
                    )
                    records += filter(_complains, page["HistoryRecords"])
                    if not page.get("NextToken"):
                        break
                    token = {"NextToken": page["NextToken"]}
        except FleetError as error:
            return str(error)
        if not records:
            return None
        said = max(records, key=lambda one: one["Timestamp"]).get("EventInformation") or {}
        return ": ".join(text for text in (said.get("EventSubType"), said.get("EventDescription")) if text)

    def resize(self, name: str, machines: int, *, ends_surplus: bool = True) -> None:
        """Ask for ``machines`` in all. Raises FleetError, and ConfigError below 0.

        Unless it ``ends_surplus``, nobody above that is ended: whoever goes is not replaced.
        """
        Ec2Fleet(self._required(name)["FleetId"], ec2=self._ec2).set_capacity(machines, ends_surplus=ends_surplus)

    def down(self, name: str) -> str:
        """End the fleet and its machines, and remove its launch template. Returns the fleet's id. Raises FleetError."""
        fleet = self._required(name)["FleetId"]
        with explained(f"fleet {name!r}", "ended"):
            answer = self._ec2.delete_fleets(FleetIds=[fleet], TerminateInstances=True)
        failed = [one["Error"]["Message"] for one in answer.get("UnsuccessfulFleetDeletions") or ()]
        if failed:
            raise FleetError(f"fleet {name!r} can't be ended ({'; '.join(failed)}); end {fleet} in the AWS console")
        self._remove_template(name)
        return str(fleet)

    def check_rights(self, name: str, *, down: bool) -> None:
        """See that AWS allows :meth:`resize`, and :meth:`down` if that is to come. Changes nothing. Raises FleetError.

        Not at what stands in for EC2 at another address, which may take a trial for the deed.
        """
        fleet = self._required(name)["FleetId"]
        if not any(part in self._ec2.meta.endpoint_url for part in _AWS):
            return
        trials = [Call("modify_fleet", resizing(fleet, 1, ends_surplus=False))]
        if down:
            trials.append(Call("delete_fleets", {"FleetIds": [fleet], "TerminateInstances": True}))
            trials.append(Call("delete_launch_template", {"LaunchTemplateName": template_name(name)}))
        for trial in trials:
            with explained(f"fleet {name!r}", f"changed by {trial.method}"), _trial():
                getattr(self._ec2, trial.method)(**trial.arguments, DryRun=True)

    def _required(self, name: str) -> Any:
        """The live fleet of that name. Raises NoSuchFleetError for none."""
        fleet = self._find(name)
        if fleet is None:
            raise NoSuchFleetError(
                f"there is no fleet {name!r} in this region; check its name, or give its region: --region NAME"
            )
        return fleet

    def _find(self, name: str) -> Any:
        """The live fleet with the name's tag. AWS takes no tag as a filter here, so all are looked through."""
        with explained("fleets", "listed"):
            pages = self._ec2.get_paginator("describe_fleets").paginate()
            for fleet in (one for page in pages for one in page["Fleets"]):
                tags = {tag["Key"]: tag["Value"] for tag in fleet.get("Tags") or ()}
                if tags.get(TAG) == name and fleet["FleetState"] in _LIVE:
                    return fleet
        return None

    def _root_device(self, image: str) -> str:
        """What the image calls its root disk, for which there are several names."""
        with explained(f"image {image!r}", "looked at"):
            found = self._ec2.describe_images(ImageIds=[image])["Images"]
        device = found[0].get("RootDeviceName") if found else None
        if not device:
            raise FleetError(f"there is no image {image!r} with a root disk in this region; check image_id and region")
        return str(device)

    def _template(self, name: str) -> Any:
        """The data of the fleet's launch template."""
        with explained(f"launch template {template_name(name)!r}", "looked at"):
            answer = self._ec2.describe_launch_template_versions(
                LaunchTemplateName=template_name(name), Versions=["$Latest"]
            )
        return answer["LaunchTemplateVersions"][0]["LaunchTemplateData"]

    def _remove_template(self, name: str) -> None:
        with explained(f"launch template {template_name(name)!r}", "removed"):
            names = [{"Name": "launch-template-name", "Values": [template_name(name)]}]
            if self._ec2.describe_launch_templates(Filters=names)["LaunchTemplates"]:
                self._ec2.delete_launch_template(LaunchTemplateName=template_name(name))

    def _prices(self, types: Iterable[str]) -> dict[tuple[str, str], float]:
        """The newest price by type and zone."""
        wanted = sorted(types)
        if not wanted:
            return {}
        # Without a system the newest may be that of Windows, which costs twice as much.
        pages = self._ec2.get_paginator("describe_spot_price_history").paginate(
            InstanceTypes=wanted, ProductDescriptions=[SYSTEM], StartTime=self._now()
        )
        newest = sorted((one for page in pages for one in page["SpotPriceHistory"]), key=lambda one: one["Timestamp"])
        return {(one["InstanceType"], one["AvailabilityZone"]): float(one["SpotPrice"]) for one in newest}

    def _machine(self, found: Any, prices: dict[tuple[str, str], float]) -> FleetMachine:
        zone, kind = found["Placement"]["AvailabilityZone"], found["InstanceType"]
        return FleetMachine(
            found["InstanceId"],
            kind,
            zone,
            found["State"]["Name"],
            max(0.0, (_ended(found, self._now()) - found["LaunchTime"]).total_seconds() / 3600.0),
            prices.get((kind, zone)),
            found.get("PrivateIpAddress", ""),
            found.get("PrivateDnsName", ""),
        )


def _complains(record: Any) -> bool:
    """Whether an entry of a fleet's history says why it has too few machines."""
    subject = (record.get("EventInformation") or {}).get("EventSubType", "")
    return record.get("EventType") in _COMPLAINTS or subject in _HINDRANCES


def _ended(found: Any, now: datetime) -> datetime:
    """When a machine ended, as EC2 says it in words; ``now`` while it runs or where the words are others."""
    if found["State"]["Name"] not in ("terminated", "shutting-down", "stopped"):
        return now
    _, _, moment = found.get("StateTransitionReason", "").partition("(")
    try:
        return datetime.strptime(moment.rstrip(")"), "%Y-%m-%d %H:%M:%S %Z").replace(tzinfo=timezone.utc)
    except ValueError:
        return now
