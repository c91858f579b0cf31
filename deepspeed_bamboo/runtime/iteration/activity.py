"""This worker's position in the sequence of activities, and what it reports about that after a change of epoch."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from deepspeed_bamboo.core.consensus import Report
from deepspeed_bamboo.core.grid import Coordinate
from deepspeed_bamboo.core.progress import CoordinateProgress
from deepspeed_bamboo.core.restoring import Kept
from deepspeed_bamboo.core.schedule import Plan
from deepspeed_bamboo.errors import MessageError
from deepspeed_bamboo.runtime.comm.encoding import decode, encode

Round = Mapping[str, Any]
"""One agreement: every worker's value, by worker."""


def encode_round(agreed: Round) -> str:
    """Text form of an agreement, for reports."""
    return base64.b64encode(encode(agreed)).decode("ascii")


def decode_round(text: str) -> Round:
    """Inverse of :func:`encode_round`. Raises MessageError for anything that it has not made."""
    try:
        agreed = decode(base64.b64decode(text, validate=True))
    except MessageError:
        raise
    except (ValueError, TypeError) as error:
        raise MessageError(f"a text that is no agreement of this job ({error})") from error
    if not isinstance(agreed, dict) or not all(isinstance(worker, str) for worker in agreed):
        raise MessageError(
            f"a {type(agreed).__name__} that is no agreement of this job: it has no value for each worker"
        )
    return agreed


@dataclass
class ActivityState:
    """The activity in progress, or the next one while ``kind`` is None.

    ``rounds`` are the agreements seen in it, ``delivered`` how many of them were acted upon.
    ``plan`` is what recovery laid down for activity ``planned``; used instead of a fresh one.
    ``step`` is how many iterations were complete when it began. ``redone``: it is an iteration that was agreed upon,
    and that has been done again with those before it; ``was_redone``: so was the last one. ``unseen``: how many
    activities were done again, in all, of which the script saw nothing.
    """

    index: int = 0
    kind: str | None = None
    rounds: list[Round] = field(default_factory=list)
    previous: list[Round] = field(default_factory=list)
    delivered: int = 0
    planned: int = -1
    plan: Plan | None = None
    step: int = 0
    redone: bool = False
    was_redone: bool = False
    unseen: int = 0

    @property
    def seen(self) -> int:
        """As ``index``, of those that the script sees: the same on all workers whose scripts are at the same call."""
        return self.index - self.unseen

    def finish(self) -> None:
        """The activity is over; the next one has not started."""
        self.previous = self.rounds
        self.rounds = []
        self.delivered = 0
        self.index += 1
        self.kind = None
        self.was_redone, self.redone = self.redone, False

    def become(self, other: ActivityState) -> None:
        """Be what ``other`` is: the parts of a worker share this one."""
        self.__dict__.update(vars(replace(other)))

    def report(
        self,
        progress: Mapping[Coordinate, CoordinateProgress],
        *,
        redundant: Mapping[Coordinate, CoordinateProgress],
        step: int,
        kept: Kept,
    ) -> Report:
        """What the other survivors need to know. ``step``: how many iterations are complete here."""
        return Report(
            activity=self.index,
            kind=self.kind,
            rounds=tuple(encode_round(agreed) for agreed in self.rounds),
            previous=tuple(encode_round(agreed) for agreed in self.previous),
            progress=progress,
            redundant=redundant,
            step=step if self.kind is None else self.step,
            kept=kept,
        )

    def adopt(self, agreed: Mapping[int, tuple[str, ...]]) -> None:
        """Take over agreements of the current activity that others have seen and this worker has not."""
        for text in agreed.get(self.index, ())[len(self.rounds) :]:
            self.rounds.append(decode_round(text))
