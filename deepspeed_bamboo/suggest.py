"""Words for "that name doesn't exist": the value, the nearest valid name, and all valid ones."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(value: object, valid: Iterable[str], *, similarity: float = 0.6) -> str | None:
    """The name in ``valid`` that ``value`` most looks like, or None when nothing is near."""
    by_lower = {name.lower(): name for name in valid}
    found = difflib.get_close_matches(str(value).lower(), by_lower, n=1, cutoff=similarity)
    return by_lower[found[0]] if found else None


def choose_from(value: object, valid: Iterable[str]) -> str:
    """``'lzay'; did you mean 'lazy'? Valid are: off, lazy, eager, full``."""
    names = tuple(valid)
    return f"{value!r}{did_you_mean(nearest(value, names), names)}"


def did_you_mean(near: str | None, valid: Iterable[str]) -> str:
    """What follows the value: ``; did you mean 'lazy'? Valid are: off, lazy, eager, full``."""
    question = f"; did you mean {near!r}?" if near else "."
    return f"{question} Valid are: {', '.join(valid)}"
