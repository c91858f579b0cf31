"""Types of command-line options, for argparse."""

from __future__ import annotations

import argparse
import math


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
