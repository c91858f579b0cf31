"""What all workers of a job must have in common, so that one that comes later trains the same model in the same way."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_SHOWN = 5
_ABSENT = object()


@dataclass(frozen=True)
class JobFacts:
    """``settings``: those that results depend on; ``layers``: the kinds of all layers of the model, in order;
    ``stages``: by stage a fingerprint of its parameters' names, shapes and types, of one worker's stage or of all."""

    settings: Mapping[str, Any]
    layers: tuple[str, ...]
    stages: Mapping[int, str]

    def to_json(self) -> dict[str, Any]:
        """A value that ``json`` can write and :meth:`from_json` reads back equal."""
        stages = {str(stage): text for stage, text in self.stages.items()}
        return {"settings": dict(self.settings), "layers": list(self.layers), "stages": stages}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> JobFacts:
        """Inverse of :meth:`to_json`."""
        stages = {int(stage): str(text) for stage, text in value["stages"].items()}
        return cls(value["settings"], tuple(value["layers"]), stages)

    def differences(self, own: JobFacts) -> tuple[str, ...]:
        """In which ways ``own``, a newcomer's, is not what this job has; a sentence each, the first few of them."""
        found = [*_different_settings(own.settings, self.settings), *_different_layers(own.layers, self.layers)]
        if own.layers == self.layers:
            found += [
                f"the parameters of stage {stage} have other names, shapes or types than in the job; give the script "
                "the same arguments"
                for stage, text in sorted(own.stages.items())
                if self.stages.get(stage, text) != text
            ]
        more = [f"and {len(found) - _SHOWN} more differences"] if len(found) > _SHOWN else []
        return (*found[:_SHOWN], *more)


def changed_settings(
    before: Mapping[str, Any], now: Mapping[str, Any], *, but: Collection[str] = ()
) -> tuple[str, ...]:
    """Which settings are not as ``before``, a few words each. Those of which ``but`` has the first part don't count."""
    was, its = dict(_flat(before)), dict(_flat(now))
    names = [name for name in sorted(was.keys() | its.keys()) if name.partition(".")[0] not in but]
    values = [(name, was.get(name, _ABSENT), its.get(name, _ABSENT)) for name in names]
    return tuple(f"{name} is {_shown(new)} and was {_shown(old)}" for name, old, new in values if old != new)


def _different_settings(own: Mapping[str, Any], jobs: Mapping[str, Any]) -> Iterator[str]:
    mine, theirs = dict(_flat(own)), dict(_flat(jobs))
    for name in sorted(mine.keys() | theirs.keys()):
        here, there = mine.get(name, _ABSENT), theirs.get(name, _ABSENT)
        if here != there:
            yield f"{name} is {_shown(here)} here and {_shown(there)} in the job"


def _different_layers(own: tuple[str, ...], jobs: tuple[str, ...]) -> Iterator[str]:
    if len(own) != len(jobs):
        yield f"the model has {len(own)} layers here and {len(jobs)} in the job"
    for number, (here, there) in enumerate(zip(own, jobs, strict=False)):
        if here != there:
            yield f"layer {number} is a {here} here and a {there} in the job"
            return


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, part in value.items():
        if isinstance(part, Mapping):
            yield from _flat(part, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", part


def _shown(value: object) -> str:
    return "absent" if value is _ABSENT else repr(value)
