"""Guesses which cloud this machine is in, without using the network.

A metadata service that isn't there costs a second of waiting at every start, so only machines that
show a sign of a cloud ask for one.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

_DMI = Path("/sys/class/dmi/id")
# (file in the machine's description, text in it, cloud)
_SIGNS = (
    ("sys_vendor", "Amazon EC2", "aws"),
    ("bios_vendor", "Amazon EC2", "aws"),
    ("product_version", "amazon", "aws"),  # before the Nitro machines
    ("product_name", "Google Compute Engine", "gcp"),
    ("chassis_asset_tag", "7783-7084-3265-9085-8269-3286-77", "azure"),  # the vendor alone is any Hyper-V
)
_VARIABLES = (
    ("AWS_EXECUTION_ENV", "aws"),
    ("AWS_EC2_METADATA_SERVICE_ENDPOINT", "aws"),
    ("BAMBOO_AWS_METADATA", "aws"),
    ("GCE_METADATA_HOST", "gcp"),
    ("BAMBOO_GCP_METADATA", "gcp"),
    ("BAMBOO_AZURE_METADATA", "azure"),
)


def likely_cloud(environment: Mapping[str, str], *, description: Path = _DMI) -> str:
    """``aws``, ``gcp`` or ``azure`` by the environment, else by the machine's own description; else ``none``."""
    for variable, cloud in _VARIABLES:
        if environment.get(variable):
            return cloud
    for name, text, cloud in _SIGNS:
        if text in _read(description / name):
            return cloud
    return "none"


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
