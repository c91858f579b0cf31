"""Locks that killed builds of torch extensions leave: whoever builds the same next waits for ever, without a word."""

from __future__ import annotations

from collections.abc import Iterator

from deepspeed_bamboo.doctor.finding import Finding, warning
from deepspeed_bamboo.doctor.subject import Subject

_BUILD_SECONDS = 1800.0  # no build of DeepSpeed's takes longer
_FRESH_SECONDS = 60.0
_OF_STOCK_ALONE = ("deepspeed_shm_comm",)  # what jobs of this plugin never build


def check_build_locks(subject: Subject) -> Iterator[Finding]:
    """Checks that no lock is older than a build takes; one that may be of a build that runs is worth a word."""
    for path, age_seconds in subject.machine.build_locks(subject.environment):
        if age_seconds > _FRESH_SECONDS and path.parent.name in _OF_STOCK_ALONE:
            yield warning(
                f"{path} is {age_seconds / 60.0:.0f} min old: jobs of this plugin don't build that, but one of plain "
                "DeepSpeed waits for its lock",
                f"rm {path}, unless something builds there now",
            )
        elif age_seconds > _BUILD_SECONDS:
            yield Finding(
                f"{path} is {age_seconds / 3600.0:.1f} h old: a build was killed, and the next one waits for its lock",
                f"rm {path}, unless something builds there now",
            )
        elif age_seconds > _FRESH_SECONDS:
            yield warning(
                f"{path} is {age_seconds / 60.0:.0f} min old: something builds there, or its build was killed, and "
                "then all that need the same wait for ever",
                f"if no process named ninja, nvcc or c++ runs here: rm {path}",
            )
