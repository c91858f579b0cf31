"""What of a fleet that lives is other than its spec says. Only its number of machines can be changed. Pure."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any

from deepspeed_bamboo.cloud.fleet_spec import FleetSpec, max_price, user_data
from deepspeed_bamboo.protocol import FLEET, SINCE


def differences(spec: FleetSpec, *, fleet: Mapping[str, Any], template: Mapping[str, Any]) -> tuple[str, ...]:
    """One phrase for each. ``fleet`` and ``template`` (its data) as EC2 describes them."""
    overrides = [one for part in fleet.get("LaunchTemplateConfigs") or () for one in part.get("Overrides") or ()]
    disks = [one["Ebs"]["VolumeSize"] for one in template.get("BlockDeviceMappings") or () if "Ebs" in one]
    prices = {None if one.get("MaxPrice") is None else float(one["MaxPrice"]) for one in overrides}
    price = max_price(spec)
    pairs: list[tuple[str, Any, Any]] = [
        ("max_dollars_per_machine_hour", prices, {None if price is None else float(price)}),
        ("instance_types", {one.get("InstanceType") for one in overrides}, set(spec.instance_types)),
        ("subnets", {one.get("SubnetId") for one in overrides}, set(spec.subnets)),
        ("image_id", {template.get("ImageId")}, {spec.image_id}),
        ("security_groups", set(template.get("SecurityGroupIds") or ()), set(spec.security_groups)),
        ("instance_profile", {(template.get("IamInstanceProfile") or {}).get("Name")}, {spec.instance_profile}),
        ("key_name", {template.get("KeyName")}, {spec.key_name}),
        ("disk_gigabytes", set(disks), {spec.disk_gigabytes}),
    ]
    found = [f"{name} ({_words(theirs)}; in the spec {_words(ours)})" for name, theirs, ours in pairs if theirs != ours]
    if _script(str(template.get("UserData") or "")) != _without_time(user_data(spec)):
        found.append("the start script (command, directory or environment)")
    return tuple(found)


def _words(values: set[Any]) -> str:
    shown = ["none" if one is None else f"{one:g}" if isinstance(one, float) else str(one) for one in values]
    return ", ".join(sorted(shown)) or "none"


def _script(encoded: str) -> str:
    try:
        return _without_time(base64.b64decode(encoded).decode())
    except (binascii.Error, UnicodeDecodeError):
        return ""


def _without_time(script: str) -> str:
    """The start script without its fleet and when that was made; scripts of before have neither."""
    ours = tuple(f"export {name}=" for name in (FLEET, SINCE))
    return "\n".join(line for line in script.splitlines() if not line.startswith(ours))
