"""Blocks of stages by time: as good as trying everything, near the least that is possible, and in time."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_bamboo.core.grid import Grid
from deepspeed_bamboo.core.placement import Placement
from deepspeed_bamboo.core.placing.balance import TOLERANCE, balance
from deepspeed_bamboo.core.placing.cutting import cut, shared
from deepspeed_bamboo.core.placing.sites import WorkerSite
from deepspeed_bamboo.core.timing import Profile, iteration_seconds

DURATION = st.integers(1, 4).map(float)


def sites(count: int, *, zones: int = 1) -> list[WorkerSite]:
    return [WorkerSite(f"w{i}", f"n{i}", f"z{i % zones}") for i in range(count)]


def fastest(grid: Grid, workers: int, profile: Profile, *, micro_batches: int) -> float:
    """Of all placements of whole stages."""
    names = [f"w{i}" for i in range(workers)]
    return min(
        iteration_seconds(
            Placement.of(grid, owners=dict(zip(grid, owners, strict=True)), shadows={}),
            profile,
            micro_batches=micro_batches,
        )
        for owners in itertools.product(names, repeat=len(grid))
    )


@settings(max_examples=15, deadline=None)
@given(
    forward=st.lists(DURATION, min_size=2, max_size=5),
    workers=st.integers(1, 3),
    slow=st.sampled_from([1.0, 0.5]),
    micro_batches=st.integers(1, 4),
)
def test_brute_force_agrees(forward: list[float], workers: int, slow: float, micro_batches: int) -> None:
    grid = Grid(1, len(forward))
    profile = Profile(tuple(forward), tuple(2.0 * f for f in forward), {"w0": slow}, handover=0.1)
    found = balance(grid, sites(workers), profile=profile, micro_batches=micro_batches)
    best = fastest(grid, workers, profile, micro_batches=micro_batches)
    assert best * (1.0 - 1e-9) <= found.seconds <= best * (1.0 + TOLERANCE)
    assert found.least_seconds <= best * (1.0 + 1e-9)


@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize(
    ("stages", "workers"),
    [(7, 3), pytest.param(8, 3, marks=pytest.mark.sweep), pytest.param(7, 4, marks=pytest.mark.sweep)],
)
def test_near_the_best_of_all_placements_where_not_all_are_tried(stages: int, workers: int, uneven: bool) -> None:
    """At most 1.05 of it, for 8 stages on 3 workers and for stages of 1 to 4; not all of thousands are tried."""
    forward = tuple(float(1 + 3 * uneven * (i % 2)) for i in range(stages))
    profile = Profile(forward, forward, handover=0.1)
    found = balance(Grid(1, stages), sites(workers), profile=profile, micro_batches=2)
    assert found.seconds <= 1.05 * fastest(Grid(1, stages), workers, profile, micro_batches=2)


@given(work=st.lists(DURATION, min_size=1, max_size=9), speeds=st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=1))
def test_no_other_cut_has_a_faster_slowest_block(work: list[float], speeds: list[float]) -> None:
    speeds = speeds[:4]

    def slowest(owners: list[int]) -> float:
        return max(
            sum(seconds for seconds, owner in zip(work, owners, strict=True) if owner == worker) / speed
            for worker, speed in enumerate(speeds)
        )

    ends = itertools.combinations_with_replacement(range(len(work) + 1), len(speeds) - 1)
    best = min(
        slowest([sum(i >= end for end in its) for i in range(len(work))])
        for its in ends  # block b ends where the b-th of these is
    )
    for way in (cut, shared):
        owners = way(work, speeds)
        assert owners == sorted(owners) and len(owners) == len(work)
        assert slowest(owners) == pytest.approx(best)


# Seconds of what a search without a limit of time has found, in units of the shortest forward.
@pytest.mark.parametrize(("workers", "found_by_long_search"), [(3, 360.0), (5, 254.0), (7, 213.75)])
def test_sixteen_uneven_stages_are_within_5_percent_of_what_a_long_search_finds(
    workers: int, found_by_long_search: float
) -> None:
    forward = tuple(float(1 + stage % 4) for stage in range(16))
    for handover in (0.0, 0.0625, 0.125):
        profile = Profile(forward, tuple(2.0 * one for one in forward), handover=handover)
        found = balance(Grid(1, 16), sites(workers), profile=profile, micro_batches=8)
        assert found.seconds <= 1.05 * found_by_long_search, handover


def test_no_loss_of_a_node_or_zone_is_fatal() -> None:
    grid, workers = Grid(2, 8), sites(5, zones=2)
    placement = balance(grid, workers, profile=Profile.even(8), micro_batches=8).placement
    for zone in ("z0", "z1"):
        assert placement.without([site.worker for site in workers if site.zone == zone])[1] == ()


def test_what_is_as_fast_stays_where_it_is() -> None:
    grid, workers, profile = Grid(1, 8), sites(4), Profile.even(8)
    before = balance(grid, workers, profile=profile, micro_batches=8).placement
    again = balance(grid, workers, profile=profile, micro_batches=8, current=before)
    assert again.bytes_moved == 0 and again.placement.owners == before.owners


def test_a_slow_worker_gets_less() -> None:
    profile = Profile((1.0,) * 8, (2.0,) * 8, {"w1": 0.5})
    placement = balance(Grid(1, 8), sites(4), profile=profile, micro_batches=16).placement
    assert len(placement.hosted_by("w1")) == 1
    assert {len(placement.hosted_by(worker)) for worker in ("w0", "w2", "w3")} <= {2, 3}


def test_a_thousand_workers_take_less_than_two_seconds_after_every_kind_of_change() -> None:
    grid, workers, profile = Grid(20, 100), sites(1000, zones=20), Profile.even(100)
    current: Placement | None = None
    slow = Profile(profile.forward, profile.backward, {"w7": 0.5}, profile.handover)
    lost = {"w17", "w500"}
    for its, known in (
        (workers, profile),
        ([site for site in workers if site.worker not in lost], profile),
        (workers, profile),
        (workers, slow),
    ):
        here = {site.worker for site in its}
        if current is not None:
            current = current.without([w for w in current.workers if w not in here])[0]
        started = time.process_time()
        current = balance(grid, its, profile=known, micro_batches=8, current=current).placement
        assert time.process_time() - started < 2.0
