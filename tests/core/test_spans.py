"""Whether iterations show that a worker is slow, and that nobody is named when they don't."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_bamboo.core.measuring import Iteration, Measured
from deepspeed_bamboo.core.spans import Spans

WORKERS = ("w0", "w1", "w2", "w3")


def spans_of(*seconds: float, spread: str = "one each") -> Spans:
    spans = Spans()
    for one in seconds:
        spans = spans.after(spread, seconds=one)
    return spans


def shown(spans: Spans, *, predicted: float) -> bool:
    return spans.show("one each", newest=5, predicted=lambda: predicted)


def measured_with(
    seconds: Callable[[int], float], *, slow_since: int, iterations: int, predicted: float = 0.2
) -> set[int]:
    """The iterations after which w1 counts as slow; its passes take twice as long from ``slow_since`` on."""
    measured, found = Measured(), set()
    for iteration in range(iterations):
        samples = {
            worker: {stage: (0.01, 0.02) if worker != "w1" or iteration < slow_since else (0.02, 0.04)}
            for stage, worker in enumerate(WORKERS)
        }
        whole = Iteration(seconds(iteration), 8, lambda _worker, _speed: predicted)
        measured = measured.after(samples, members=WORKERS, iteration=whole)
        if "w1" in measured.speeds:
            found.add(iteration)
    return found


def test_a_worker_whose_passes_are_longer_is_slow_where_iterations_are_longer_too() -> None:
    found = measured_with(lambda iteration: 0.3 if iteration < 20 else 0.5, slow_since=20, iterations=30)
    assert min(found) <= 24 and found == set(range(min(found), 30))


def test_passes_that_take_longer_in_iterations_that_do_not_are_no_slow_worker() -> None:
    # On H200s: passes of one stage went from 12 to 21 ms, its iterations from 185 to 200, where 231 was predicted.
    seconds = [0.185] * 40 + [0.2] * 40
    found = measured_with(lambda iteration: seconds[iteration], slow_since=40, iterations=80, predicted=0.046)
    assert found == set()


def test_a_slow_worker_that_delays_nobody_is_named_all_the_same() -> None:
    assert measured_with(lambda _iteration: 0.3, slow_since=20, iterations=30, predicted=0.0)


def test_half_the_speed_is_found_where_most_of_an_iteration_is_not_passes() -> None:
    found = measured_with(
        lambda iteration: 0.9 if iteration < 20 else 1.05, slow_since=20, iterations=30, predicted=0.15
    )
    assert min(found) <= 24


def test_a_worker_that_is_a_little_slower_soon_after_stages_moved_is_found() -> None:
    """Twelve iterations show that, of which the newest five are too few; the others are no past."""
    measured, found = Measured(), []
    for iteration in range(50):
        pace = 1.5 if iteration >= 26 else 1.0
        samples = {worker: {stage: (0.01, 0.02)} for stage, worker in enumerate(WORKERS)}
        samples["w1"] = {1: (0.01 * pace, 0.02 * pace)}
        micro_batches = 4 if iteration < 20 else 8  # another spread has another past
        whole = Iteration(0.3 * (1.4 if iteration >= 26 else 1.0), micro_batches, lambda _worker, _speed: 0.12)
        measured = measured.after(samples, members=WORKERS, iteration=whole)
        found += [iteration] if "w1" in measured.speeds else []
    assert found and found[0] <= 26 + 11
    spans = spans_of(*[0.3] * 6, *[0.42] * 12)
    assert spans.show("one each", newest=12, predicted=lambda: 0.12)
    assert not shown(spans, predicted=0.12), "most of what was before the newest five is slow, too"


def test_a_replacement_that_was_slow_from_its_start_is_compared_with_iterations_before() -> None:
    spans = spans_of(*[1.0] * 10)
    for _ in range(20):
        spans = spans.after("without one", seconds=1.4)
    for _ in range(5):
        spans = spans.after("one each", seconds=1.8)
    assert shown(spans, predicted=1.0)
    assert not spans.after("without one", seconds=1.4).show("without one", newest=5, predicted=lambda: 1.0)


def test_a_short_past_shows_whatever_passes_say() -> None:
    assert shown(spans_of(*[1.0] * 9), predicted=1.0)
    assert not shown(spans_of(*[1.0] * 10), predicted=1.0)
    assert shown(Spans(), predicted=1.0)


def test_what_is_predicted_is_asked_for_only_where_it_decides() -> None:
    def never() -> float:
        raise AssertionError("it costs a simulation")

    assert spans_of(*[1.0] * 9).show("one each", newest=5, predicted=never)
    assert not spans_of(*[1.0] * 10, *[0.9] * 5).show("one each", newest=5, predicted=never)


@settings(max_examples=50, deadline=None)
@given(
    past=st.lists(st.floats(0.9, 1.1), min_size=5, max_size=60),
    grown=st.floats(0.0, 4.0),
    predicted=st.floats(0.0, 4.0),
)
def test_half_of_the_predicted_growth_is_the_least(past: list[float], grown: float, predicted: float) -> None:
    share = grown - 0.5 * predicted
    if abs(share) > 0.11:  # what the past may differ by
        assert shown(spans_of(*past, *[1.0 + grown] * 5), predicted=predicted) == (share > 0.0 and grown > 0.11)


@settings(max_examples=20, deadline=None)
@given(spreads=st.lists(st.integers(0, 60), max_size=300))
def test_what_is_kept_is_bounded(spreads: list[int]) -> None:
    spans = Spans()
    for spread in spreads:
        spans = spans.after(spread, seconds=1.0)
        assert spread in spans.kept
    assert len(spans.kept) <= 16 and all(len(its) <= 48 for its in spans.kept.values())
