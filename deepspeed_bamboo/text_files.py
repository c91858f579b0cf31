"""Reads text and JSON that users name. Whatever is wrong with it becomes one error, whose text is the reason alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from deepspeed_bamboo.errors import BambooError

_TOO_DEEP = "its brackets are nested too deeply"


class UnreadableError(BambooError, ValueError):
    """A file or text can't be used. Says why in a few words; the caller adds the file, and what to give."""

    def __init__(self, reason: str, *, line: int = 0) -> None:
        """``line``: of the text, counted from 1; 0 for all of it."""
        super().__init__(reason)
        self.line = line


def text_of(path: Path) -> str:
    """The text of a file, without a byte-order mark. Raises UnreadableError."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UnreadableError(f"can't be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise UnreadableError(
            f"is no text in UTF-8 (byte {error.start} is {error.object[error.start]:#04x})"
        ) from error
    except ValueError as error:
        raise UnreadableError(f"is no path ({error})") from error


def json_of(text: str) -> Any:
    """The value of a JSON text. Raises UnreadableError for all that Python's reader trips over, and for a key that is
    there twice, of which it would take the last."""
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except UnreadableError:
        raise
    except json.JSONDecodeError as error:
        raise UnreadableError(f"not JSON ({error.msg}, line {error.lineno})", line=error.lineno) from error
    except ValueError as error:  # a number of thousands of digits
        raise UnreadableError(f"not JSON ({str(error).partition(';')[0]})") from error
    except RecursionError as error:
        raise UnreadableError(f"not JSON ({_TOO_DEEP})") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in found if keys.count(key) > 1)
        raise UnreadableError(f"{twice!r} is there more than once in one object, and only one can count; keep one")
    return found
