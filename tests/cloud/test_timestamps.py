"""Deadlines don't depend on the clock of this machine being right."""

from __future__ import annotations

from datetime import datetime, timezone

import pytest

from deepspeed_bamboo.cloud.metadata_http import Answer
from deepspeed_bamboo.cloud.timestamps import deadline_of, parse

NOW = datetime(2026, 9, 15, 8, 20, tzinfo=timezone.utc).timestamp()
DATED = Answer(200, {"date": "Tue, 15 Sep 2026 08:20:00 GMT"}, "", 1000.0)
UNDATED = Answer(200, {}, "", 1000.0)
HOUR = 3600.0


@pytest.mark.parametrize(
    "text",
    [
        "2026-09-15T08:21:40Z",
        "2026-09-15T08:21:40+00:00",
        "2026-09-15T10:21:40+02:00",
        "2026-09-15T08:21:40",
        "Tue, 15 Sep 2026 08:21:40 GMT",
        " Tue, 15 Sep 2026 08:21:40 -0000 ",
    ],
)
def test_forms(text: str) -> None:
    moment = parse(text)
    assert moment is not None and moment.timestamp() == NOW + 100


@pytest.mark.parametrize("text", [None, "", "  ", 5, [], "soon", "2026-13-01T00:00:00Z", "0001-01-01T00:00:00+23:59"])
def test_what_is_no_time(text: object) -> None:
    assert parse(text) is None or isinstance(parse(text), datetime)
    if not isinstance(text, str) or "0001" not in text:
        assert parse(text) is None


@pytest.mark.parametrize("skew_seconds", [0.0, HOUR, -HOUR, 1e9])
def test_the_date_of_the_answer_counts_and_not_the_clock(skew_seconds: float) -> None:
    deadline = deadline_of("2026-09-15T08:21:40Z", DATED, longest_seconds=120, wall_clock=lambda: NOW + skew_seconds)
    assert deadline == 1100.0


@pytest.mark.parametrize(("skew_seconds", "expected"), [(0.0, 1100.0), (HOUR, 1000.0), (-HOUR, 1120.0)])
def test_without_a_date_a_wrong_clock_is_bounded(skew_seconds: float, expected: float) -> None:
    deadline = deadline_of("2026-09-15T08:21:40Z", UNDATED, longest_seconds=120, wall_clock=lambda: NOW + skew_seconds)
    assert deadline == expected


def test_a_date_that_cannot_be_read_is_none() -> None:
    answer = Answer(200, {"date": "today"}, "", 1000.0)
    assert deadline_of("2026-09-15T08:21:40Z", answer, longest_seconds=120, wall_clock=lambda: NOW) == 1100.0
