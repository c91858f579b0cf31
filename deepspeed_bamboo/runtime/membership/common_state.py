"""What all workers know alike besides the placement. A worker that joins gets it from one of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class Known(Protocol):
    """A part of what is known, which a newcomer takes as it is."""

    def to_json(self) -> Any:
        """As values that can be sent."""

    def take(self, value: Any) -> None:
        """Inverse of :meth:`to_json`."""


class CommonState:
    """One worker's copy of it.

    Args:
        attributes: of the engine; those with one of ``names`` belong to it (counters, the seed of forwards).
        parts: the rest by name. A newcomer has the parts that the others have, since its settings are theirs.
    """

    def __init__(self, attributes: dict[str, Any], *, names: Sequence[str], parts: Mapping[str, Known]) -> None:
        self._attributes = attributes
        self._names = tuple(names)
        self._parts = dict(parts)

    def to_json(self) -> dict[str, Any]:
        """What a worker that joins has to know."""
        return {
            "attributes": {name: self._attributes[name] for name in self._names},
            "parts": {name: part.to_json() for name, part in self._parts.items()},
        }

    def take(self, value: Mapping[str, Any]) -> None:
        """Inverse of :meth:`to_json`."""
        self._attributes.update(value["attributes"])
        for name, part in self._parts.items():
            if name in value["parts"]:
                part.take(value["parts"][name])
