"""Checks the metadata service, the zone, and the source of preemption notices."""

from __future__ import annotations

from collections.abc import Iterator

from deepspeed_bamboo.cloud.detection import CLOUD_VARIABLE, CLOUDS, ZONE_VARIABLE, detect
from deepspeed_bamboo.cloud.notice import UNKNOWN
from deepspeed_bamboo.doctor.finding import Finding, warning
from deepspeed_bamboo.doctor.subject import Subject
from deepspeed_bamboo.errors import ConfigError


def check_cloud(subject: Subject) -> Iterator[Finding]:
    """The zone is known where there are several machines, and a cloud that is named answers."""
    section = subject.section
    source = section.notices.source
    environment = dict(subject.environment)
    if source in ("none", *CLOUDS):
        environment[CLOUD_VARIABLE] = source
    if source in CLOUDS and section.notices.base_url:
        environment[f"BAMBOO_{source.upper()}_METADATA"] = section.notices.base_url
    zone_given = section.topology.zones != "auto" or bool(environment.get(ZONE_VARIABLE))
    if not zone_given and len(subject.hosts) < 2 and source not in CLOUDS:
        return
    try:
        found = detect(environment, zones=section.topology.zones).identity
    except ConfigError as error:
        yield Finding(str(error), "correct the variable")
        return
    if source in CLOUDS and found.instance == UNKNOWN:
        yield Finding(
            f"notices.source is {source!r}, and its metadata service does not answer here",
            "run this on an instance; in a container allow two hops to the service (or name notices.base_url)",
        )
    elif found.zone == UNKNOWN and len(subject.hosts) > 1:
        yield warning(
            "this machine's zone is not known, so a stage and its shadow may be in the same zone",
            "set BAMBOO_ZONE on each machine, or topology.zones",
        )
