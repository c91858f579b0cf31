"""What gloo, NCCL and torch's stores say when a connection fails, in words for people."""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)

# The first that is found counts: a line about a reset may also say that it was reading.
_CAUSES = (
    ("reset by peer", "the connection was reset"),
    ("closed by peer", "the connection was closed"),
    ("caused pair closure", "the connection was closed"),
    ("refused", "the connection was refused"),
    ("timed out", "the connection timed out"),
    ("timeout", "the connection timed out"),
    ("broken pipe", "the connection was closed"),
    ("got 0 bytes", "the connection was closed"),
    ("unreachable", "there is no route to it"),
    ("no route to host", "there is no route to it"),
)
# What a raw text of those libraries has in it: places in their sources, or their names.
_RAW = (".cc:", ".cpp:", "NCCL", "gloo")


def cause_of(error: BaseException) -> str:
    """A short reason for ``error``; its own first line where that was not written by those libraries."""
    text = str(error)
    first = text.splitlines()[0] if text else type(error).__name__
    found = next((words for part, words in _CAUSES if part in text.lower()), None)
    if found is None and any(mark in text for mark in _RAW):
        found = "the connection failed"
    if found is None:
        return first
    logger.info("%s: %s", found, first)
    return found
