"""A finding of a check: how bad it is, what is wrong, and what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepspeed_bamboo.doctor.subject import Subject


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong. A ``blocker`` stops the job, or breaks its promise; others cost time or money."""

    what: str
    remedy: str
    blocker: bool = True

    def __str__(self) -> str:
        return f"{'BLOCKER' if self.blocker else 'warning'}: {self.what}\n    {self.remedy}"


Check = Callable[["Subject"], Iterator[Finding]]


def warning(what: str, remedy: str) -> Finding:
    """A finding that is no blocker."""
    return Finding(what, remedy, blocker=False)
