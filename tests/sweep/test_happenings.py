"""What is drawn from a seed, and what the event logs of a run prove."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_bamboo.core.grid import Grid
from deepspeed_bamboo.sweep.happenings import Kind, draw, faults_of
from deepspeed_bamboo.sweep.step_record import redone_problems, step_problems, ways_back

GRID = Grid(1, 2)


@given(seed=st.integers(0, 10**6), pipelines=st.integers(1, 2), stages=st.integers(1, 4), count=st.integers(1, 40))
def test_a_worker_goes_only_when_another_is_sure_to_be_there(
    seed: int, pipelines: int, stages: int, count: int
) -> None:
    grid = Grid(pipelines, stages)
    arguments: dict[str, Any] = {"grid": grid, "steps": 50, "count": count, "micro_batches": 4}
    happenings = draw(seed, workers=len(grid), most=len(grid) + 2, **arguments)
    assert happenings == draw(seed, workers=len(grid), most=len(grid) + 2, **arguments)
    assert len({happening.step for happening in happenings}) == len(happenings) == count
    faults_of(happenings).check(grid, micro_batches=4)
    here, joining = len(grid), []
    for happening in happenings:
        here += len([step for step in joining if happening.step - step > 3])
        joining = [step for step in joining if happening.step - step <= 3]
        if happening.kind is Kind.JOIN:
            joining.append(happening.step)
        elif happening.kind is not Kind.ETCD:
            assert happening.coordinate in grid
            here -= 1
            assert here >= 1
        assert here + len(joining) <= len(grid) + 2
    kills = [happening.step for happening in happenings if happening.kind is Kind.KILL]
    assert all(later - earlier >= 3 for earlier, later in itertools.pairwise(kills)), kills


@given(seed=st.integers(0, 10**6), stages=st.integers(3, 5), count=st.integers(30, 60))
def test_bulk_losses_leave_somebody_and_are_many(seed: int, stages: int, count: int) -> None:
    grid = Grid(1, stages)
    happenings = draw(
        seed, grid=grid, steps=150, count=count, micro_batches=4, workers=stages, most=stages + 2, bulk=True
    )
    faults_of(happenings).check(grid, micro_batches=4)
    here = stages
    for happening in happenings:
        if happening.kind is Kind.BULK:
            assert 2 <= happening.workers < here and happening.fault is not None
        else:
            assert happening.workers == 1
        here += (happening.kind is Kind.JOIN) - happening.workers * (happening.kind not in (Kind.JOIN, Kind.ETCD))
        assert 1 <= here <= stages + 2


def test_among_a_hundred_events_there_are_bulk_losses_of_two_to_all_but_one() -> None:
    lost: set[int] = set()
    for seed in range(1, 6):
        drawn = draw(seed, grid=Grid(1, 4), steps=300, count=100, micro_batches=4, workers=4, most=6, bulk=True)
        found = [happening.workers for happening in drawn if happening.kind is Kind.BULK]
        assert len(found) >= 5
        lost |= set(found)
    assert lost == {2, 3, 4, 5}


def test_more_events_than_steps_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least 14 steps; got 13"):
        draw(1, grid=GRID, steps=13, count=10, micro_batches=1, workers=2, most=2)


def logs() -> dict[str, list[dict[str, Any]]]:
    def step(number: int, *hosted: str) -> dict[str, Any]:
        used = {"0": [2 * number, 2 * number + 2]} if "0.0" in hosted else {}
        return {"event": "step", "step": number, "hosted": list(hosted), "used": used}

    return {"a": [step(0, "0.0"), step(1, "0.0")], "b": [step(0, "0.1"), step(1, "0.1")]}


def problems(changed: dict[str, list[dict[str, Any]]]) -> list[str]:
    return step_problems(changed, grid=GRID, steps=2, micro_batches=2)


def test_two_owners_in_one_step_are_found() -> None:
    assert problems(logs()) == []
    changed = logs()
    changed["b"][1]["hosted"] = ["0.0", "0.1"]
    assert problems(changed) == ["0.0 was stepped by a and b in step 1"]


def test_a_step_that_nobody_took_is_found_unless_its_worker_was_killed_in_it() -> None:
    changed = logs()
    last = changed["a"].pop()
    assert problems(changed) == [
        "0.0 was stepped by nobody in step 1",
        "pipeline 0 used micro-batches [], not (2, 4), in step 1",
    ]
    changed["a"].append({"event": "fault", "step": 1, "fault": {"at": "step"}})
    assert problems(changed) == []
    changed["a"].append({**last, "used": {"0": [2, 3]}})
    assert problems(changed) == ["pipeline 0 used micro-batches [(2, 3)], not (2, 4), in step 1"]


def test_the_steps_in_which_some_went_back_are_left_out() -> None:
    changed = logs()
    changed["b"][1]["hosted"] = ["0.0", "0.1"]
    assert step_problems(changed, grid=GRID, steps=2, micro_batches=2, cut_short=(1,)) == []


def test_ways_back_count_once_and_steps_done_again_must_have_the_same_loss() -> None:
    way = {"event": "restored", "step": 9, "from_step": 6, "source": "memory", "redone": 3, "workers": ["w0", "w1"]}
    events = [{**way, "seconds": 0.5}, {**way, "seconds": 0.7}, {**way, "step": 12, "from_step": 11, "redone": 1}]
    assert [(found.step, found.redone, found.seconds) for found in ways_back(events)] == [(9, 3, 0.7), (12, 1, 0.0)]
    again = [{"event": "redone", "step": 6, "loss": 0.25}, {"event": "redone", "step": 7, "loss": 0.5}]
    assert redone_problems(again, {6: 0.25, 7: 0.5}) == []
    assert redone_problems(again, {6: 0.25, 7: 0.75}) == ["step 7 was done again with the loss 0.5, not 0.75"]
