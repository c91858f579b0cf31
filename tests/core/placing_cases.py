"""Cases for the tests of placing: every way to lay workers out over nodes and zones, and hypothesis strategies."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from hypothesis import strategies as st

from deepspeed_bamboo.core.grid import Coordinate, Grid
from deepspeed_bamboo.core.placement import Placement
from deepspeed_bamboo.core.placing.sites import WorkerSite

# Workers of each node, nodes of each zone: ((2, 1), (1,)) is a zone of two nodes and a zone of one.
Layout = tuple[tuple[int, ...], ...]


def layouts(workers: int) -> list[Layout]:
    """Every layout of so many workers, each once whatever its order."""
    found = set()
    for zones in partitions(workers, workers):
        for nodes in itertools.product(*(tuple(partitions(zone, zone)) for zone in zones)):
            found.add(tuple(sorted(nodes)))
    return sorted(found)


def partitions(total: int, most: int) -> Iterator[tuple[int, ...]]:
    """The ways to write ``total`` as a sum of numbers of at most ``most``, largest first."""
    if total == 0:
        yield ()
    for first in range(min(total, most), 0, -1):
        for rest in partitions(total - first, first):
            yield (first, *rest)


def sites_of(layout: Layout) -> list[WorkerSite]:
    """Workers named by zone, node and place."""
    return [
        WorkerSite(f"w{z}.{n}.{i}", f"n{z}.{n}", f"z{z}")
        for z, nodes in enumerate(layout)
        for n, members in enumerate(nodes)
        for i in range(members)
    ]


def grids(coordinates: int) -> Iterator[Grid]:
    """Every grid of at most so many coordinates."""
    for pipelines in range(1, coordinates + 1):
        for stages in range(1, coordinates // pipelines + 1):
            yield Grid(pipelines, stages)


@st.composite
def some_sites(draw: st.DrawFn, *, most: int = 12) -> list[WorkerSite]:
    """Workers on nodes in zones, some zones unknown."""
    zone_of = draw(st.lists(st.sampled_from(["a", "b", "c", "d", ""]), min_size=1, max_size=most))
    nodes = draw(st.lists(st.integers(0, len(zone_of) - 1), min_size=1, max_size=most))
    return [WorkerSite(f"w{i}", f"n{node}", zone_of[node]) for i, node in enumerate(nodes)]


@st.composite
def some_current(draw: st.DrawFn, grid: Grid, sites: list[WorkerSite]) -> Placement:
    """A placement of any kind on these workers and two that are gone."""
    workers = [*(site.worker for site in sites), "gone0", "gone1"]
    owners = {c: draw(st.sampled_from(workers)) for c in grid}
    shadows = {c: draw(st.sampled_from(workers)) for c in grid if draw(st.booleans())}
    return Placement.of(grid, owners=owners, shadows={c: w for c, w in shadows.items() if w != owners[c]})


def some_bytes(grid: Grid) -> st.SearchStrategy[dict[Coordinate, int]]:
    """Sizes of the state of every coordinate."""
    return st.fixed_dictionaries({c: st.integers(0, 5) for c in grid})
