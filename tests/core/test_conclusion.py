"""What survivors publish and conclude: outlines do as well as whole reports, and grow with nothing."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from deepspeed_bamboo.core.consensus import Report, conclude, keeper

# The agreements of two activities, of which everybody has seen a beginning.
EARLIER, LATER = ("e0", "e1", "e2"), ("l0", "l1")


@st.composite
def reports(draw: st.DrawFn) -> dict[str, Report]:
    """Survivors that are at most one activity apart; nobody saw an agreement that somebody had not come to."""
    names = [f"w{number}" for number in range(draw(st.integers(1, 5)))]
    behind = {name: draw(st.booleans()) for name in names}
    found = {}
    for name in names:
        if behind[name]:
            seen = draw(st.integers(0, len(EARLIER)))
            found[name] = Report(3, kind="train", rounds=EARLIER[:seen], previous=("p0",))
        else:
            seen = 0 if any(behind.values()) else draw(st.integers(0, len(LATER)))
            found[name] = Report(4, kind="train", rounds=LATER[:seen], previous=EARLIER)
    return found


@given(reports())
def test_with_the_keepers_whole_report_outlines_say_all_that_is_needed(whole: dict[str, Report]) -> None:
    outlines = {name: report.outline() for name, report in whole.items()}
    most, needing = keeper(outlines)
    assert (most, needing) == keeper(whole)
    expected = conclude(whole)
    for name, report in whole.items():
        known = {**outlines, most: whole[most]} if most is not None and name in needing else outlines
        concluded = conclude(known)
        assert {a: len(rounds) for a, rounds in concluded.agreed.items()} == {
            a: len(rounds) for a, rounds in expected.agreed.items()
        }
        # What ActivityState.adopt takes over: agreements of its current activity beyond those it has seen.
        news = expected.agreed.get(report.activity, ())[len(report.rounds) :]
        assert concluded.agreed.get(report.activity, ())[len(report.rounds) :] == news
        assert (concluded.activity, concluded.kind) == (expected.activity, expected.kind)


@given(reports())
def test_nobody_is_asked_when_all_have_seen_the_same(whole: dict[str, Report]) -> None:
    if len({(report.activity, report.rounds) for report in whole.values()}) == 1:
        assert keeper(whole) == (None, frozenset())


def test_outlines_do_not_grow_with_what_was_agreed() -> None:
    small, large = Report(1, rounds=("x",)), Report(1, rounds=("x" * 100_000,))
    assert json.dumps(small.outline().to_json()) == json.dumps(large.outline().to_json())
