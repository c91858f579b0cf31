"""Lazy or eager: the cheaper one, without flapping, and for a reason that names the figures."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_bamboo.core.choosing import MARGIN, Figures, choose, loss_rate, middle, predict
from deepspeed_bamboo.core.grid import Grid
from deepspeed_bamboo.core.placement import Placement
from deepspeed_bamboo.core.schedule import Mode

CHOICES = (Mode.LAZY, Mode.EAGER)
seconds = st.floats(0.0, 1e4, allow_subnormal=False)
figures = st.builds(Figures, st.floats(1e-4, 1e4), seconds, st.floats(0.0, 1e5, allow_subnormal=False), seconds)


@given(figures, st.sampled_from(CHOICES))
def test_the_mode_chosen_is_never_worse_by_more_than_the_margin(known: Figures, current: Mode) -> None:
    cost = {Mode.LAZY: known.cost_of_lazy, Mode.EAGER: known.cost_of_eager}
    chosen = choose(known, current=current).mode
    assert cost[chosen] <= min(cost.values()) * MARGIN * (1 + 1e-9)


@given(figures, st.sampled_from(CHOICES))
def test_the_same_figures_never_make_it_change_its_mind(known: Figures, current: Mode) -> None:
    first = choose(known, current=current).mode
    assert choose(known, current=first).mode is first


@given(figures, st.floats(1.0, 100.0), st.sampled_from(CHOICES))
def test_more_losses_never_make_it_leave_eager(known: Figures, factor: float, current: Mode) -> None:
    more = Figures(
        known.iteration_seconds,
        known.eager_overhead_seconds,
        known.losses_per_hour * factor,
        known.saved_seconds_per_loss,
    )
    if choose(known, current=current).mode is Mode.EAGER:
        assert choose(more, current=current).mode is Mode.EAGER


@given(figures, st.sampled_from(CHOICES))
def test_without_losses_it_is_lazy(known: Figures, current: Mode) -> None:
    quiet = Figures(known.iteration_seconds, known.eager_overhead_seconds, 0.0, known.saved_seconds_per_loss)
    assert choose(quiet, current=current).mode is Mode.LAZY


def test_what_costs_nothing_is_taken_as_soon_as_there_are_losses() -> None:
    assert choose(Figures(0.2, 0.0, 0.5, 0.05)).mode is Mode.EAGER


def test_the_reason_names_the_figures_and_their_origin() -> None:
    choice = choose(Figures(0.2, 0.01, 12.0, 0.05), notes="overhead predicted")
    assert choice.reason == (
        "lazy: redundant forwards would cost 171 s of each hour (10 ms of each iteration of 200 ms) and save 0.6 s "
        "(12 losses an hour, 50 ms of repeated forwards each); overhead predicted"
    )


@pytest.mark.parametrize("wrong", [(0.0, 0.0, 0.0, 0.0), (1.0, -1.0, 0.0, 0.0), (1.0, 0.0, math.inf, 0.0)])
def test_figures_that_cannot_be_are_refused(wrong: tuple[float, float, float, float]) -> None:
    with pytest.raises(ValueError, match="finite number from 0 up"):
        Figures(*wrong)


@given(st.integers(1, 2), st.integers(2, 4), st.integers(1, 8))
def test_the_schedule_predicts_shares_of_an_iteration(pipelines: int, stages: int, micro_batches: int) -> None:
    grid = Grid(pipelines, stages)
    placement = Placement.initial(grid, [f"w{rank}" for rank in range(len(grid))])
    prediction = predict(placement, micro_batches=micro_batches)
    assert 0.0 <= prediction.eager_overhead <= 1 / 3 + 1e-9  # a forward for each forward and backward
    assert 0.0 < prediction.saved_per_loss <= 1 / 6 + 1e-9
    repeating = predict(placement, micro_batches=micro_batches, eager=Mode.EAGER_RECOMPUTE)
    assert repeating.eager_overhead <= prediction.eager_overhead
    assert repeating.saved_per_loss == 0.0


def test_rates_and_middles() -> None:
    assert loss_rate(0, seconds=10.0) == 0.0
    assert loss_rate(2, seconds=1800.0) == 4.0
    assert loss_rate(0, seconds=0.0, expected_per_hour=3.0) == 3.0
    assert loss_rate(5, seconds=3600.0, expected_per_hour=3.0) == 4.0
    assert middle([]) is None
    assert middle([3.0, 1.0, 2.0]) == 2.0
