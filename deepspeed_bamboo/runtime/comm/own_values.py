"""The values of this package that workers send each other, and their plain form: that of JSON, checked when read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from deepspeed_bamboo.coordination.records import EpochRecord
from deepspeed_bamboo.core.checkpointing import CheckpointNote
from deepspeed_bamboo.core.choosing import Choice
from deepspeed_bamboo.core.job_facts import JobFacts
from deepspeed_bamboo.core.reconfiguring import Target
from deepspeed_bamboo.core.schedule import Mode
from deepspeed_bamboo.errors import MessageError


@dataclass(frozen=True)
class OwnValue:
    """How values of ``kind`` are sent: ``to_plain`` and ``from_plain`` are each other's inverse.

    ``from_plain`` raises ValueError, TypeError, KeyError or AttributeError for what ``to_plain`` can't have made.
    """

    kind: type
    to_plain: Callable[[Any], Any]
    from_plain: Callable[[Any], Any]


def _choice(value: Mapping[str, Any]) -> Choice:
    _check(value["reason"], str)
    return Choice(Mode(value["mode"]), value["reason"])


def _epoch(value: Mapping[str, Any]) -> EpochRecord:
    _check(value["number"], int)
    _check(value["time_seconds"], float, int)
    for text in (value["reason"], value["proposer"], *value["members"], *value["lost"]):
        _check(text, str)
    return EpochRecord.from_json(value)


def _target(value: Mapping[str, Any]) -> Target:
    for text in (value["reason"], *value["members"], *value["joining"], *value["leaving"]):
        _check(text, str)
    return Target.from_json(value)


def _check(value: object, *kinds: type) -> None:
    if type(value) not in kinds:
        raise MessageError(f"a message with {value!r:.80} where {' or '.join(kind.__name__ for kind in kinds)} belongs")


OWN_VALUES: Mapping[str, OwnValue] = {
    "note": OwnValue(CheckpointNote, CheckpointNote.to_json, CheckpointNote.from_json),
    "choice": OwnValue(Choice, lambda value: {"mode": value.mode.value, "reason": value.reason}, _choice),
    "epoch": OwnValue(EpochRecord, EpochRecord.to_json, _epoch),
    "facts": OwnValue(JobFacts, JobFacts.to_json, JobFacts.from_json),
    "target": OwnValue(Target, Target.to_json, _target),
}
