"""The cost model and the step times made of it, checked against a schedule that is played through."""

from __future__ import annotations

import heapq
import json
from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_bamboo.sim.cost import (
    JobProfile,
    LayerCost,
    ProfileError,
    coordinate_state_bytes,
    hosted_step_seconds,
    profile_from_json,
    profile_to_json,
    redundant_forward_overhead,
    split_layers,
    step_seconds,
)
from deepspeed_bamboo.sim.errors import MissingStepTimeError, ScenarioError
from deepspeed_bamboo.sim.hosting import Hosting
from deepspeed_bamboo.sim.steptimes import Grid, ProfiledSteps, StepTable

EVEN = JobProfile("even", (LayerCost(1.0, 2.0, 10, 0),) * 24, micro_batch_samples=4, link_bytes_per_second=1e9)
layers = st.builds(LayerCost, st.floats(0.001, 1), st.floats(0.001, 1), st.integers(0, 100), st.integers(0, 100))


def test_even_pipelines_take_micro_batches_plus_stages_less_one() -> None:
    # 88 micro-batches over 2 pipelines; a stage of 6 layers takes 18 s a micro-batch.
    assert step_seconds(EVEN, pipelines=2, stages=4, samples_per_step=352) == pytest.approx((44 + 3) * 18)


def test_communication_and_update_come_on_top() -> None:
    slow = replace(
        EVEN,
        layers=(LayerCost(1.0, 2.0, 10, 500),) * 24,
        link_bytes_per_second=1000.0,
        optimizer_seconds_per_parameter=0.1,
    )
    # Filling: 3 boundaries, each crossed twice, 0.5 s; reducing 60 parameters of 4 bytes, 2 (D-1)/D = 1; updating 6 s.
    expected = (44 + 3) * 18 + 3.0 + 0.24 + 6.0
    assert step_seconds(slow, pipelines=2, stages=4, samples_per_step=352) == pytest.approx(expected)


@given(st.lists(layers, min_size=1, max_size=9), st.integers(1, 9))
@settings(deadline=None)
def test_splits_are_contiguous_and_best(found: list[LayerCost], stages: int) -> None:
    profile = JobProfile("any", tuple(found), 1, 1e9)
    if stages > len(found):
        with pytest.raises(ProfileError, match="ask for fewer stages"):
            split_layers(profile, stages=stages)
        return
    parts = split_layers(profile, stages=stages)
    assert [index for part in parts for index in part] == list(range(len(found)))
    assert all(parts)
    times = [layer.forward_seconds + layer.backward_seconds for layer in found]
    assert max(sum(times[index] for index in part) for part in parts) == pytest.approx(best_split(times, stages))


def best_split(times: list[float], stages: int) -> float:
    """The slowest stage of the best split, by trying all."""
    if stages == 1:
        return sum(times)
    return min(max(sum(times[:cut]), best_split(times[cut:], stages - 1)) for cut in range(1, len(times) - stages + 2))


@pytest.mark.parametrize("pipelines,micro_batches", [(4, 22), (6, 11), (6, 22)])
@pytest.mark.parametrize("workers", [12, 16, 20, 24, 29, 32, 36, 48])
def test_several_coordinates_a_worker_cost_what_a_played_schedule_does(
    pipelines: int, micro_batches: int, workers: int
) -> None:
    """The closed form is within 5 % of a greedy schedule: what LiveSpec.hosting_overhead stands for."""
    hosting = Hosting(Grid(pipelines, 24))
    for index in range(workers):
        hosting.join(f"w{index}", "")
    hosting.place_all()
    predicted = hosted_step_seconds(
        EVEN,
        pipelines=pipelines,
        stages=24,
        most_hosted=hosting.most_hosted,
        samples_per_step=4 * pipelines * micro_batches,
    )
    played = play(hosting, micro_batches)
    assert 0.85 * predicted < played < 1.05 * predicted


def play(hosting: Hosting, micro_batches: int, forward: float = 1.0, backward: float = 2.0) -> float:
    """The length of a step in which every worker takes up the next ready work, backwards first, oldest first.

    As in 1F1B, no stage has more micro-batches in flight than stages follow it.
    """
    stages = hosting.grid.stages
    ready: dict[str | None, list[tuple[int, int, int, int]]] = defaultdict(list)
    in_flight: dict[int, int] = defaultdict(int)
    working: set[str | None] = set()
    ends: list[tuple[float, int, bool, int]] = []

    def offer(coordinate: int, is_backward: bool, micro_batch: int) -> None:
        entry = (not is_backward, micro_batch, -(coordinate % stages), coordinate)
        heapq.heappush(ready[hosting.host[coordinate]], entry)

    def take(worker: str | None, now: float) -> None:
        passed = []
        while ready[worker] and worker not in working:
            entry = heapq.heappop(ready[worker])
            is_forward, micro_batch, _, coordinate = entry
            if is_forward and in_flight[coordinate] >= stages - coordinate % stages:
                passed.append(entry)
                continue
            working.add(worker)
            in_flight[coordinate] += bool(is_forward)
            heapq.heappush(ends, (now + (forward if is_forward else backward), coordinate, not is_forward, micro_batch))
        for entry in passed:
            heapq.heappush(ready[worker], entry)

    for pipeline in range(hosting.grid.pipelines):
        for micro_batch in range(micro_batches):
            offer(pipeline * stages, False, micro_batch)
    for worker in set(hosting.host):
        take(worker, 0.0)
    now = 0.0
    while ends:
        now, coordinate, was_backward, micro_batch = heapq.heappop(ends)
        working.discard(hosting.host[coordinate])
        following = coordinate
        if was_backward:
            in_flight[coordinate] -= 1
            if coordinate % stages:
                following = coordinate - 1
                offer(following, True, micro_batch)
        elif (coordinate + 1) % stages:
            following = coordinate + 1
            offer(following, False, micro_batch)
        else:
            offer(coordinate, True, micro_batch)
        for worker in {hosting.host[coordinate], hosting.host[following]}:
            take(worker, now)
    assert not any(ready.values())
    return now


@given(st.lists(layers, min_size=1, max_size=5), st.floats(0, 1))
def test_profiles_survive_their_text_form(found: list[LayerCost], hidden: float) -> None:
    profile = JobProfile("any", tuple(found), 2, 1e9, hidden_fraction=hidden)
    assert profile_from_json(profile_to_json(profile)) == profile


def test_overhead_and_state() -> None:
    assert redundant_forward_overhead(EVEN) == pytest.approx(1 / 3)
    assert redundant_forward_overhead(replace(EVEN, hidden_fraction=0.5)) == pytest.approx(1 / 6)
    assert coordinate_state_bytes(EVEN, stages=5) == 5 * 10 * 16


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layers": []}, "give at least one layer"),
        ({"micro_batch_samples": 0}, "micro_batch_samples 0"),
        ({"speed": 3}, "unknown key 'speed'"),
        ({"link_bytes_per_second": 0}, "link_bytes_per_second is not above 0"),
        ({"hidden_fraction": 2}, "hidden_fraction is 2"),
        ({"layers": [{"forward_seconds": 1}]}, "layer 0 lacks 'backward_seconds'"),
        ({"link_bytes_per_second": "fast"}, "'fast'; give a finite number"),
        ({"layers": [{"forward_seconds": -1, "backward_seconds": 1, "parameters": 1, "output_bytes": 1}]}, "negative"),
    ],
)
def test_wrong_profiles_are_refused(change: dict[str, object], words: str) -> None:
    data = {**json.loads(profile_to_json(EVEN)), **change}
    with pytest.raises(ProfileError, match=words):
        profile_from_json(json.dumps(data))


def test_a_table_knows_its_rows_and_interpolates_by_the_busiest_workers_share() -> None:
    table = StepTable("BERT", {Grid(4, 12): 1.45, Grid(3, 12): 1.805, Grid(2, 12): 2.39, Grid(1, 12): 4.31}, layers=24)
    assert table.grid_seconds(Grid(3, 12)) == 1.805
    # Six of 144 coordinates is what a worker of two pipelines of twelve stages does.
    assert table.hosted_seconds(Grid(6, 24), most_hosted=6) == pytest.approx(2.39)
    assert table.hosted_seconds(Grid(6, 24), most_hosted=9) == pytest.approx((2.39 + 4.31) / 2)
    assert table.hosted_seconds(Grid(6, 24), most_hosted=24) == pytest.approx(4.31 + 2 * (4.31 - 2.39))
    # Nothing says that more than the largest row would be faster still.
    assert table.hosted_seconds(Grid(6, 24), most_hosted=1) == 1.45
    # 24 layers on 10 stages: the largest stage has 3.
    assert table.hosted_seconds(Grid(1, 10), most_hosted=1) == table.hosted_seconds(Grid(1, 8), most_hosted=1)
    assert table.largest_pipelines(stages=12, machines=47) == 3
    assert table.largest_pipelines(stages=12, machines=100) == 4
    assert table.largest_pipelines(stages=12, machines=11) == 0


def test_a_missing_row_is_an_error_that_names_those_there_are() -> None:
    table = StepTable("BERT", {Grid(3, 12): 1.8, Grid(1, 12): 4.3})
    with pytest.raises(MissingStepTimeError, match=r"BERT has no step time for the grid 2x12 .* known are 1x12, 3x12"):
        table.largest_pipelines(stages=12, machines=24)
    with pytest.raises(MissingStepTimeError, match="grid 1x8"):
        table.largest_pipelines(stages=8, machines=24)
    with pytest.raises(ScenarioError, match="is empty"):
        StepTable("BERT", {})


@given(st.integers(1, 6), st.integers(1, 24), st.integers(1, 6))
@settings(deadline=None)
def test_no_grid_is_faster_than_the_bound(pipelines: int, stages: int, hosted: int) -> None:
    steps = ProfiledSteps(EVEN, 96, 6)
    grid = Grid(pipelines, stages)
    workers = -(-grid.size // hosted)
    most_hosted = -(-grid.size // workers)
    assert steps.hosted_seconds(grid, most_hosted=most_hosted) >= steps.fastest_seconds(workers) - 1e-9
