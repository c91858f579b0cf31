"""Types of command-line options, for argparse."""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path

_DAY_SECONDS = 86_400.0
_MOST_SECONDS = 1_000_000


def number(text: str) -> float:
    """A finite number. Raises ArgumentTypeError for anything else, ``nan``, ``inf`` and ``1e400`` included."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is no finite number; write one such as 0.5")
    return value


def positive(text: str) -> float:
    """A finite number above 0. Raises ArgumentTypeError for anything else."""
    value = number(text)
    if value <= 0.0:
        raise argparse.ArgumentTypeError(f"{text} must be above 0")
    return value


def at_most_a_day(text: str) -> float:
    """Seconds above 0 and up to a day. Raises ArgumentTypeError for anything else."""
    value = positive(text)
    if value > _DAY_SECONDS:
        raise argparse.ArgumentTypeError(f"{text} seconds are more than a day, {_DAY_SECONDS:g}; give fewer")
    return value


def at_least_one(text: str) -> int:
    """A whole number from 1. Raises ArgumentTypeError for anything else."""
    value = number(text)
    if value < 1 or value != int(value):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1; write one such as 2")
    return int(value)


def seconds(text: str) -> float:
    """A duration above 0 that clocks can hold. Raises ArgumentTypeError for anything else."""
    positive(text)
    return up_to_eleven_days(text)


def up_to_eleven_days(text: str) -> float:
    """A duration from 0 that clocks can hold. Raises ArgumentTypeError for anything else."""
    value = number(text)
    if value < 0.0:
        raise argparse.ArgumentTypeError(f"{text} must be 0 or more")
    if value > _MOST_SECONDS:
        raise argparse.ArgumentTypeError(f"{text} must be at most {_MOST_SECONDS} (eleven days)")
    return value


def filled(text: str) -> str:
    """The text as it is. Raises ArgumentTypeError for an empty one, as a variable leaves it that is not set."""
    if not text.strip():
        raise argparse.ArgumentTypeError(
            "it is empty; is the variable set that it comes from? Leave the option out, or give its value"
        )
    return text


def path_text(text: str) -> str:
    """A path or base64, as it is but for a leading ``~``, which shells leave as it is behind ``=`` and in quotes.

    Raises ArgumentTypeError for an empty one, which would be the current folder.
    """
    filled(text)
    return os.path.expanduser(text) if text.startswith("~") and not os.path.exists(text) else text  # noqa: PTH110, PTH111


def file_path(text: str) -> Path:
    """The same as a Path."""
    return Path(path_text(text))
