"""What is measured of passes."""

from __future__ import annotations

import torch

from deepspeed_bamboo.core.grid import Coordinate
from deepspeed_bamboo.runtime.iteration.pass_times import PassTimes


def test_the_least_of_the_first_forwards_is_what_a_stage_keeps() -> None:
    """The first ones allocate what later ones find."""
    allocated = [0]
    times = PassTimes(torch.device("cpu"), allocated=lambda: allocated[0])
    for number in range(8):
        assert times.kept_bytes == {}
        for forward in (True, False):
            with times.measuring(Coordinate(0, 2), forward=forward):
                allocated[0] += 100 + (900 if number == 0 else 0) if forward else -100
    assert times.kept_bytes == {2: 100}
    times.disturb()
    assert times.kept_bytes == {}


def test_where_nobody_counts_bytes_none_are_known() -> None:
    times = PassTimes(torch.device("cpu"), allocated=None)
    for _ in range(9):
        with times.measuring(Coordinate(0, 0), forward=True):
            pass
    assert times.kept_bytes == {}
