"""A fleet of spot machines on AWS as its owner describes it, and the calls that make it. Pure: makes no calls."""

from __future__ import annotations

import base64
import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from deepspeed_bamboo.config.messages import describe
from deepspeed_bamboo.errors import ConfigError
from deepspeed_bamboo.protocol import FLEET, SINCE
from deepspeed_bamboo.text_files import UnreadableError, json_of, text_of

# Every resource of a fleet carries this tag, with the fleet's name.
TAG = "deepspeed_bamboo-fleet"
ROOT_DEVICE = "the image's root device"
_USER_DATA_BYTES = 16_384  # EC2's limit
_LATEST_SECONDS = 9_999_999_999.0


def _filled(value: str) -> str:
    if not value.strip():
        raise ValueError(f"{value!r} names nothing; write what is meant")
    return value


def _absolute(value: str) -> str:
    if not value.startswith("/"):
        raise ValueError(f"{value!r} is no absolute path, and machines begin in /; write the whole path, from / on")
    return value


def _literal(values: dict[str, str]) -> dict[str, str]:
    for name, value in values.items():
        if _EXPANDED.search(value):
            raise ValueError(
                f"{name} is {value!r}, but values are taken as they stand: no variable, command or ~ in them is "
                f"expanded; write out what is meant, such as the whole {name}, or set it in the command"
            )
    return values


_EXPANDED = re.compile(r"\$[A-Za-z_{(]|`|(^|:)~")
_Text = Annotated[str, AfterValidator(_filled)]
_Variables = dict[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], str]


class FleetSpec(BaseModel):
    """The input of ``ds_bamboo fleet up``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9-]{0,62}$")]
    """Of the fleet: letters, digits and hyphens, at most 63."""

    machines: Annotated[int, Field(ge=1, le=10_000, strict=True)]
    """How many the fleet keeps."""

    instance_types: Annotated[tuple[_Text, ...], Field(min_length=1)]
    """Alike in GPU and memory; the more there are, the fewer interruptions."""

    subnets: Annotated[tuple[_Text, ...], Field(min_length=1)]
    """One for each zone that machines may be in."""

    image_id: _Text
    """AMI that has the driver, Python and this package."""

    command: _Text
    """The job's command; each machine runs it in ``directory`` by ``ds_bamboo run``, which repeats it while machines
    are missing. So ``ds_bamboo`` has to be on the image's PATH, or on one in ``environment``."""

    directory: Annotated[str, AfterValidator(_absolute)] = "/opt/train"
    """Where the command runs, the same on all machines."""

    environment: Annotated[_Variables, AfterValidator(_literal)] = {}
    """Variables of the command, as they stand: a PATH is written out as a whole. No secrets: whoever may describe the
    launch template reads them."""

    max_dollars_per_machine_hour: Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)] | None = None
    """The most to pay for one machine an hour, not for the fleet; null: up to the on-demand price."""

    security_groups: tuple[_Text, ...] = ()
    """Ids. Workers of one job must reach each other on all ports."""

    instance_profile: _Text | None = None
    """Name of the IAM instance profile, with rights to the checkpoints' bucket."""

    key_name: _Text | None = None
    """SSH key pair, if any."""

    disk_gigabytes: Annotated[int, Field(ge=8, le=16_384, strict=True)] = 100
    """Root disk of each machine."""

    region: _Text | None = None
    """AWS region; null: as boto3 finds it."""


@dataclass(frozen=True)
class Call:
    """One call of the EC2 API: a boto3 method and its arguments."""

    method: str
    arguments: dict[str, Any]

    def __str__(self) -> str:
        return f"ec2.{self.method} {json.dumps(self.arguments, indent=1)}"


def read_fleet_spec(path: Path | str) -> FleetSpec:
    """The spec in a JSON file. Raises ConfigError with every problem, or when the file can't be read."""
    try:
        data = json_of(text_of(Path(path)))
    except UnreadableError as error:
        raise ConfigError(f"{error}; give the path of a fleet's JSON file", where=str(path)) from error
    return parse_fleet_spec(data, where=str(path))


def parse_fleet_spec(data: object, *, where: str) -> FleetSpec:
    """The spec in plain data; ``where`` is what errors call it. Raises ConfigError with every problem."""
    if not isinstance(data, dict):
        raise ConfigError("a fleet is a JSON object; put it in braces", where=where)
    try:
        spec = FleetSpec.model_validate(data)
    except ValidationError as error:
        raise ConfigError(*describe(error, model=FleetSpec, section="fleet"), where=where) from error
    if len(user_data(spec, since_seconds=_LATEST_SECONDS).encode()) > _USER_DATA_BYTES:
        raise ConfigError(
            f"fleet.command and fleet.environment make a start script of more than {_USER_DATA_BYTES} bytes, which EC2 "
            "refuses; put the command into a script on the image",
            where=where,
        )
    return spec


def template_name(name: str) -> str:
    """The launch template of the fleet ``name``."""
    return f"{TAG}-{name}"


def user_data(spec: FleetSpec, *, since_seconds: float = 0.0) -> str:
    """The script that each machine runs when it boots: the command by ``ds_bamboo run``, again after exit code 75.

    A job that is complete since ``since_seconds``, when the fleet is made, is not begun anew by a machine that comes
    later; one of that name that was complete before is.
    """
    known = {FLEET: spec.name, SINCE: f"{since_seconds:.0f}", **dict(sorted(spec.environment.items()))}
    exports = [f"export {name}={shlex.quote(value)}" for name, value in known.items()]
    return "\n".join(
        [
            "#!/bin/bash",
            f"cd {shlex.quote(spec.directory)} || exit 1",
            *exports,
            "while true; do",
            # The bare command ends with 0 or 247 where its launcher was killed; this one knows better.
            f"  ds_bamboo run -- bash -c {shlex.quote(spec.command)}",
            "  [ $? -eq 75 ] || break",
            "  sleep 10",
            "done",
            "",
        ]
    )


def creating_calls(spec: FleetSpec, *, root_device: str = ROOT_DEVICE, since_seconds: float = 0.0) -> tuple[Call, ...]:
    """The calls that make the fleet, in order: its launch template, then the EC2 Fleet that keeps its size.

    ``root_device``: as the image calls it; any other name would be a second disk. ``since_seconds``: the time.
    """
    script = user_data(spec, since_seconds=since_seconds)
    return (_launch_template(spec, root_device=root_device, script=script), _fleet(spec))


def _tags(kind: str, name: str) -> dict[str, Any]:
    return {"ResourceType": kind, "Tags": [{"Key": TAG, "Value": name}, {"Key": "Name", "Value": name}]}


def _launch_template(spec: FleetSpec, *, root_device: str, script: str) -> Call:
    # A disk that outlives its machine costs on, and nobody lists it.
    disk = {"VolumeSize": spec.disk_gigabytes, "VolumeType": "gp3", "DeleteOnTermination": True}
    data: dict[str, Any] = {
        "ImageId": spec.image_id,
        "UserData": base64.b64encode(script.encode()).decode(),
        "BlockDeviceMappings": [{"DeviceName": root_device, "Ebs": disk}],
        # Notices come from the metadata service; tokens keep other programs' requests out of it.
        "MetadataOptions": {"HttpTokens": "required", "HttpPutResponseHopLimit": 2},
        "TagSpecifications": [_tags("instance", spec.name), _tags("volume", spec.name)],
    }
    if spec.security_groups:
        data["SecurityGroupIds"] = list(spec.security_groups)
    if spec.instance_profile is not None:
        data["IamInstanceProfile"] = {"Name": spec.instance_profile}
    if spec.key_name is not None:
        data["KeyName"] = spec.key_name
    return Call(
        "create_launch_template",
        {
            "LaunchTemplateName": template_name(spec.name),
            "LaunchTemplateData": data,
            "TagSpecifications": [_tags("launch-template", spec.name)],
        },
    )


def max_price(spec: FleetSpec) -> str | None:
    """The most that a machine may cost an hour, as EC2 is told; None where there is no bound."""
    price = spec.max_dollars_per_machine_hour
    return None if price is None else f"{price:g}"


def _fleet(spec: FleetSpec) -> Call:
    ceiling = max_price(spec)
    price = {} if ceiling is None else {"MaxPrice": ceiling}
    overrides = [
        {"InstanceType": kind, "SubnetId": subnet, **price} for kind in spec.instance_types for subnet in spec.subnets
    ]
    template = {"LaunchTemplateName": template_name(spec.name), "Version": "$Latest"}
    return Call(
        "create_fleet",
        {
            "Type": "maintain",
            "LaunchTemplateConfigs": [{"LaunchTemplateSpecification": template, "Overrides": overrides}],
            "TargetCapacitySpecification": {
                "TotalTargetCapacity": spec.machines,
                "SpotTargetCapacity": spec.machines,
                "OnDemandTargetCapacity": 0,
                "DefaultTargetCapacityType": "spot",
            },
            "SpotOptions": {"AllocationStrategy": "capacity-optimized", "InstanceInterruptionBehavior": "terminate"},
            "ReplaceUnhealthyInstances": True,
            "TagSpecifications": [_tags("fleet", spec.name)],
        },
    )
