"""One value of several parts: what a worker contributes to an agreement."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def merged(*parts: Mapping[str, Any]) -> dict[str, Any]:
    """All entries of ``parts``. Raises ValueError where two parts have the same name: one would hide the other."""
    result: dict[str, Any] = {}
    for part in parts:
        twice = sorted(result.keys() & part.keys())
        if twice:
            raise ValueError(f"two parts of an agreement are called {', '.join(twice)}; give one another name")
        result.update(part)
    return result
