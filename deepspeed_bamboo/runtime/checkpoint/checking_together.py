"""Workers look for a whole checkpoint together: one of them reads each file, and all come to the same decision."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from deepspeed_bamboo.coordination import EpochRecord
from deepspeed_bamboo.core.placement import WorkerId
from deepspeed_bamboo.errors import CheckpointError
from deepspeed_bamboo.runtime.iteration.worker import Worker
from deepspeed_bamboo.runtime.job.news import tell_once
from deepspeed_bamboo.storage.checking import Candidate, Choice, Survey, choose

Look = Callable[[Candidate, tuple[int, int]], list[str] | None]
"""What is wrong with share (i, n) of a checkpoint's files, as sentences; None: no file of it can be seen from here."""


class Agreeing(Protocol):
    """One of the workers that look together: a :class:`Worker`, or one of those who bring a state back."""

    @property
    def me(self) -> WorkerId:
        """Which one."""

    @property
    def leads(self) -> bool:
        """True on one of them."""

    @property
    def record(self) -> EpochRecord:
        """Its members are all of them."""

    def agree_on(self, kind: str, value: Callable[[], Any]) -> Mapping[WorkerId, Any]:
        """What ``value`` returns on each."""


def tell_choice(worker: Worker, choice: Choice, *, where: str) -> None:
    """Tell people, and the event log, what is wrong with which checkpoint."""
    for warning in choice.warnings:
        tell_once(worker, f"checkpoints: {warning}")
    for tag, problems in choice.damaged.items():
        worker.log_event("checkpoint", action="damaged", path=f"{where}/{tag}", reason="; ".join(problems))


def choose_together(worker: Agreeing, *, survey: Callable[[], Survey], look: Look, where: str) -> Choice:
    """The checkpoint that all workers load; collective, and the same value on all.

    The reporter's ``survey`` counts. Raises CheckpointError on all workers when it can't be made.
    """

    def seen() -> tuple[str, Any]:
        if not worker.leads:
            return "", None
        try:
            return "", survey().to_json()
        except CheckpointError as error:
            return str(error), None

    surveys = worker.agree_on("checkpoints there", seen)
    problem = next((problem for problem, _ in surveys.values() if problem), "")
    if problem:
        raise CheckpointError(problem)
    agreed = Survey.from_json(next(value for _, value in surveys.values() if value is not None))

    def check(candidate: Candidate) -> list[str] | None:
        return _problems_together(worker, candidate, look=look, where=where)

    return choose(agreed, check=check, where=where)


def _problems_together(worker: Agreeing, candidate: Candidate, *, look: Look, where: str) -> list[str] | None:
    """What is wrong with the files of ``candidate``; collective, and the same value on all workers.

    Raises CheckpointError when some workers see none of them: they are not damaged, but out of reach.
    """

    def share() -> list[str] | None:
        members = worker.record.members
        return look(candidate, (members.index(worker.me), len(members)))

    found = worker.agree_on("checkpoint checked", share)
    blind = sorted(name for name, problems in found.items() if problems is None)
    if blind and len(blind) < len(found):
        raise CheckpointError(
            f"workers {', '.join(blind)} found no checkpoint in {where}, others did ({candidate.tag}); every worker "
            "may come to own any stage, so the folder must be one that all machines see"
        )
    if blind:
        return None
    return [problem for _, problems in sorted(found.items()) for problem in problems or ()]
