"""Locks that killed builds of torch extensions leave: whoever builds the same next waits for ever, without a word."""

from __future__ import annotations

from collections.abc import Iterator

from deepspeed_bamboo.doctor.finding import Finding
from deepspeed_bamboo.doctor.subject import Subject

_BUILD_SECONDS = 1800.0  # no build of DeepSpeed's takes longer


def check_build_locks(subject: Subject) -> Iterator[Finding]:
    """Checks that no lock is older than a build takes."""
    for path, age_seconds in subject.machine.build_locks(subject.environment):
        if age_seconds > _BUILD_SECONDS:
            yield Finding(
                f"{path} is {age_seconds / 3600.0:.1f} h old: a build was killed, and the next one waits for its lock",
                f"rm {path}, unless something builds there now",
            )
