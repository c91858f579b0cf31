"""Scenarios as users write them: what is wrong on which line, and one object on top of another."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, get_args

from pydantic import BaseModel

from ..suggest import did_you_mean, nearest

__all__ = ["is_type_tag", "merged", "said_of"]


def said_of(finding: Any, path: Sequence[str], *, model: type[BaseModel], where: str, text: str) -> str:
    """One of pydantic's errors: where it is, the value, the rule."""
    line = _line_of(text, path)
    at = f"{where}:{line}" if line else where
    name = ".".join(path) or "the scenario"
    if finding["type"] == "extra_forbidden":
        valid = _keys_of(model, path[:-1])
        return f"{at}: {name} is no key{did_you_mean(nearest(path[-1], valid), valid)}"
    given = "" if finding["type"] in ("missing", "value_error") else f" is {finding['input']!r}"
    return f"{at}: {name}{given}: {finding['msg']}"


def _keys_of(model: type[BaseModel], path: Sequence[str]) -> tuple[str, ...]:
    """The keys that the object at a path of a scenario may have; what is in a list has those of its items."""
    for part in path:
        field = model.model_fields.get(part)
        if field is not None:
            inside = [field.annotation, *get_args(field.annotation)]
            model = next((one for one in inside if isinstance(one, type) and issubclass(one, BaseModel)), model)
    return tuple(model.model_fields)


def is_type_tag(part: str) -> bool:
    """Pydantic puts the tried type of a union into an error's path; users know no such keys."""
    return bool(re.search(r"[\[\(]", part)) or part in ("float", "int", "str", "constrained-float")


def _line_of(text: str, path: Sequence[str]) -> int:
    """The line on which the last key of a path stands, searching for its keys in turn; 0 if there is none."""
    at = 0
    line = 0
    for part in path:
        found = re.compile(rf'"{re.escape(part)}"\s*:').search(text, at)
        if found is None:
            continue
        at = found.end()
        line = text.count("\n", 0, found.start()) + 1
    return line


def merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`over` on top of `base`, key by key in nested objects."""
    result = dict(base)
    for key, value in over.items():
        below = result.get(key)
        result[key] = merged(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return result
