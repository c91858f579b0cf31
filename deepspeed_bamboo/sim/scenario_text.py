"""Scenarios as users write them: which line a key stands on, and one object on top of another."""

from __future__ import annotations

import re
from typing import Any

__all__ = ["is_type_tag", "line_of", "merged"]


def is_type_tag(part: str) -> bool:
    """Pydantic puts the tried type of a union into an error's path; users know no such keys."""
    return bool(re.search(r"[\[\(]", part)) or part in ("float", "int", "str", "constrained-float")


def line_of(text: str, path: list[str]) -> int:
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
