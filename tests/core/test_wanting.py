"""How many machines a fleet should keep: pure values."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_bamboo.core.reconfiguring import LEAST_GAIN
from deepspeed_bamboo.core.wanting import Wanted, missing_share, modest, wanted_machines


def blocks(stages: int) -> list[float]:
    """An iteration takes as long as the worker with the most stages."""
    return [math.nan, *(float(math.ceil(stages / machines)) for machines in range(1, 101))]


def test_machines_that_make_nothing_faster_are_not_wanted() -> None:
    found = wanted_machines(blocks(8).__getitem__, most=12, missing=0.0)
    assert (found.machines, found.spare) == (8, 0)
    assert found.reason == "8 machines are of use; all 12 would be 0.0% faster"
    # Of five to seven some have two stages, as of four.
    assert wanted_machines(blocks(8).__getitem__, most=7, missing=0.0).machines == 4
    assert wanted_machines(blocks(8).__getitem__, most=1, missing=0.5).machines == 1


def test_there_are_as_many_more_as_are_missing() -> None:
    few, many = (wanted_machines(blocks(8).__getitem__, most=20, missing=share) for share in (0.05, 0.3))
    assert 8 < few.machines <= 10 < many.machines <= 17
    assert few.reason.startswith(
        f"8 machines are of use, and {few.spare} more for those that are missing, each for 5.0%"
    )


def test_the_share_that_is_missing() -> None:
    assert missing_share(losses_per_machine_hour=0.0, boot_seconds=180.0) == 0.0
    assert missing_share(losses_per_machine_hour=1.0, boot_seconds=180.0) == pytest.approx(0.05 / 1.05)
    # However long a boot is, a share that machines can be counted with.
    absurd = missing_share(losses_per_machine_hour=0.125, boot_seconds=1e20)
    assert absurd == 0.99 and wanted_machines(blocks(8).__getitem__, most=24, missing=absurd).machines == 24


def test_a_least_number_is_kept_and_said_where_fewer_would_be_as_fast() -> None:
    found = wanted_machines(lambda machines: 1.0, most=12, missing=0.0, least=8, why_least="hold it")
    assert (found.machines, found.spare) == (8, 0)
    assert found.reason == "8 machines hold it (1 would be as fast); all 12 would be 0.0% faster"
    few = wanted_machines(blocks(8).__getitem__, most=12, missing=0.05, least=8, why_least="hold it")
    assert few == wanted_machines(blocks(8).__getitem__, most=12, missing=0.05)
    assert wanted_machines(lambda machines: 1.0, most=4, missing=0.0, least=8).machines == 4


def test_stand_bys_come_one_by_one_and_machines_of_use_at_once() -> None:
    wish = Wanted(12, 4, "8 machines are of use")
    assert [modest(wish, asked=asked).machines for asked in (2, 8, 9, 11, 12, 20)] == [9, 9, 10, 12, 12, 12]
    assert modest(wish, asked=9) == Wanted(10, 2, "8 machines are of use; one more at each look")
    assert modest(wish, asked=12) is wish


@pytest.mark.parametrize(("most", "missing"), [(0, 0.0), (4, 1.0), (4, -0.1)])
def test_what_makes_no_sense_is_refused(most: int, missing: float) -> None:
    with pytest.raises(ValueError, match=f"{most} machines, missing for {missing}"):
        wanted_machines(lambda machines: 1.0, most=most, missing=missing)


@given(st.lists(st.floats(0.1, 10.0), min_size=1, max_size=7), st.sampled_from([0.0, 0.01, 0.2, 0.6]))
@settings(deadline=None)
def test_it_is_the_least_that_is_as_fast(seconds: list[float], missing: float) -> None:
    """By counting all cases of who is there."""

    def expected(machines: int) -> float:
        total = 0.0
        for there in itertools.product((True, False), repeat=machines):
            count = sum(there)
            pace = max((1.0 / one for one in seconds[:count]), default=0.0)
            total += pace * (1.0 - missing) ** count * missing ** (machines - count)
        return total

    found = wanted_machines(lambda machines: seconds[machines - 1], most=len(seconds), missing=missing).machines
    enough = (1.0 - LEAST_GAIN) * max(expected(number) for number in range(1, len(seconds) + 1))
    assert expected(found) >= enough * (1.0 - 1e-9)
    assert all(expected(number) <= enough * (1.0 + 1e-9) for number in range(1, found))
