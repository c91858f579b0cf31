"""Locks that killed builds of torch extensions leave: whoever builds the same next waits for ever, without a word."""

from __future__ import annotations

from collections.abc import Iterator

from deepspeed_bamboo.doctor.finding import Finding, warning
from deepspeed_bamboo.doctor.subject import Subject

_BUILD_SECONDS = 1800.0  # no build of DeepSpeed's takes longer
_FRESH_SECONDS = 60.0
_BY_STOCK_ALONE = "deepspeed_shm_comm"  # the plugin leaves this operation out


def check_build_locks(subject: Subject) -> Iterator[Finding]:
    """Checks that no lock is older than a build takes; one that may be of a build that runs is worth a word."""
    for path, age_seconds in subject.machine.build_locks(subject.environment):
        if age_seconds > _BUILD_SECONDS:
            mine = path.parent.name != _BY_STOCK_ALONE
            who = "the next one waits" if mine else "plain DeepSpeed on a CPU (no job of the plugin) waits"
            yield Finding(
                f"{path} is {age_seconds / 3600.0:.1f} h old: a build was killed, and {who} for its lock",
                f"rm {path}, unless something builds there now",
                blocker=mine,
            )
        elif age_seconds > _FRESH_SECONDS:
            yield warning(
                f"{path} is {age_seconds / 60.0:.0f} min old: something builds there, or its build was killed, and "
                "then all that need the same wait for ever",
                f"if no process named ninja, nvcc or c++ runs here: rm {path}",
            )
