"""The sections of DeepSpeed's own JSON, which may hold anything: what is no object there counts as empty."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_ZERO = "zero_optimization"
# DeepSpeed takes these besides objects: null as if it were not there, and ZeRO's old spelling.
_ALSO: Mapping[str, tuple[type, ...]] = {"bf16": (type(None),), "fp16": (), "optimizer": (), _ZERO: (bool,)}
_EXAMPLES = {"optimizer": '{"type": "Adam"}', _ZERO: '{"stage": 1}'}


def section_of(settings: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    """The section that ``names`` lead to; empty where there is none, or something that is no object."""
    found: Any = settings
    for name in names:
        found = found.get(name) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def is_on(settings: Mapping[str, Any], *names: str) -> bool:
    """Whether the section that ``names`` lead to has a true ``enabled``."""
    return bool(section_of(settings, *names).get("enabled", False))


def zero_stage(settings: Mapping[str, Any]) -> Any:
    """ZeRO's stage as it is written; 1 for the old spelling ``true``, and 0 where there is none."""
    return 1 if settings.get(_ZERO) is True else section_of(settings, _ZERO).get("stage", 0)


def section_problems(settings: Mapping[str, Any]) -> Iterator[str]:
    """Sections that are no objects, at which DeepSpeed would end with an error that doesn't name them."""
    for name, also in _ALSO.items():
        value = settings.get(name, {})
        if not isinstance(value, (Mapping, *also)):
            example = _EXAMPLES.get(name, '{"enabled": true}')
            yield f"{name} is {value!r}, and a section is an object; write {example}, or leave it out"
    parameters = section_of(settings, "optimizer").get("params")
    if parameters is not None and not isinstance(parameters, Mapping):
        yield f'optimizer.params is {parameters!r}, and must be an object; write {{"lr": 1e-4}}, or leave it out'
