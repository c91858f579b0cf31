"""The values of this package that workers send each other, and their plain form: that of JSON, checked when read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from deepspeed_bamboo.coordination.records import EpochRecord
from deepspeed_bamboo.core.checkpointing import CheckpointNote
from deepspeed_bamboo.core.choosing import Choice
from deepspeed_bamboo.core.grid import Coordinate
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


def _note(value: Mapping[str, Any]) -> CheckpointNote:
    written, named = value["written"], value["named"]
    _check(value["take"], bool)
    _check(value["failure"], str)
    _check(named, int, type(None))
    if written is not None:
        _check(written[0], int)
        written = (written[0], tuple(Coordinate.parse(text) for text in written[1]))
    return CheckpointNote(take=value["take"], written=written, named=named, failure=value["failure"])


def _plain_note(note: CheckpointNote) -> dict[str, Any]:
    written = None if note.written is None else [note.written[0], [str(c) for c in note.written[1]]]
    return {**asdict(note), "written": written}


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
    "note": OwnValue(CheckpointNote, _plain_note, _note),
    "choice": OwnValue(Choice, lambda value: {"mode": value.mode.value, "reason": value.reason}, _choice),
    "epoch": OwnValue(EpochRecord, EpochRecord.to_json, _epoch),
    "facts": OwnValue(JobFacts, JobFacts.to_json, JobFacts.from_json),
    "target": OwnValue(Target, Target.to_json, _target),
}
