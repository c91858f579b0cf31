"""Placing: workers with their nodes and zones, and what is where now -> owners and shadows (architecture 6).

Goals, each weighing more than all after it:

1. no coordinate next to its own node: the fewest neighbouring pairs on one node;
2. the fewest neighbouring pairs in one zone. Both are the provable minimum (``separation`` has the bound);
3. the fewest bytes moved: what a worker holds as owner or shadow costs nothing to own there; then the fewest
   coordinates that change their owner;
4. balanced load: coordinates a worker, then shadows.

Goals 3 and 4 are searched for, with a bounded number of steps: 1,000 workers take less than a second, whatever the
history. Fewer bytes are proved impossible where a lower bound is met, or by trying all owners of small grids (up to 32
coordinates, if they are few enough); otherwise they are the fewest found. ``Decision.proven`` says which.

No worker hosts more than ``most`` coordinates, by default its fair share ``ceil(coordinates / workers)``. That limit
comes before the goals, for two reasons: the worker that hosts most sets the pace of all, and without a limit a worker
that joins would never be given anything, as nothing moves fewest bytes. It costs no safety: shadows don't have to be
with the predecessor, so with two zones no zone takes an owner and its shadow whatever the pairs (``shadowing``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from deepspeed_bamboo.core.grid import Coordinate, Grid
from deepspeed_bamboo.core.placement import Placement
from deepspeed_bamboo.core.placing.branch_and_bound import Proof
from deepspeed_bamboo.core.placing.fitting import fit
from deepspeed_bamboo.core.placing.keeping import keep_most
from deepspeed_bamboo.core.placing.local_search import Assignment, Task
from deepspeed_bamboo.core.placing.lower_bound import Bound, Pairs, count_pairs, fewest_pairs
from deepspeed_bamboo.core.placing.shadowing import with_all_shadows, without_shadows
from deepspeed_bamboo.core.placing.sites import Sites, WorkerSite
from deepspeed_bamboo.core.placing.spreading import spread

__all__ = ["BytesOf", "Decision", "WorkerSite", "decide", "place"]

BytesOf = Callable[[Coordinate], int] | Mapping[Coordinate, int]


@dataclass(frozen=True)
class Decision:
    """A placement and what it was decided by. ``bytes_moved`` are those of owners; shadows follow in background.

    ``least_bytes`` is a lower bound for ``bytes_moved``; ``proven`` says that fewer bytes can't do. Both kinds of
    pairs are always the minimum, ``bound.pairs``.
    """

    placement: Placement
    sites: Sites
    most: int
    pairs: Pairs
    bound: Bound
    bytes_moved: int
    least_bytes: int
    proven: bool
    unit: str = "bytes"

    @property
    def reason(self) -> str:
        """Why this placement, in words, one line a goal."""
        owners = [worker for _, worker in self.placement.owners]
        load = [owners.count(worker) for worker in self.sites.workers]
        moved = f"moved to new owners: {f'{self.bytes_moved} {self.unit}' if self.bytes_moved else 'nothing'}"
        why = "the fewest possible" if self.proven else f"the fewest found; at least {self.least_bytes} have to move"
        return "\n".join(
            (
                self.bound.reason,
                f"{moved} ({why})" if self.bytes_moved else moved,
                f"load: {min(load)} to {max(load)} coordinates a worker, {self.most} at most",
            )
        )


def place(
    grid: Grid,
    workers: Iterable[WorkerSite],
    *,
    current: Placement | None = None,
    bytes_of: BytesOf | None = None,
    protected: bool = True,
    most: int | None = None,
    alike: bool = False,
    copies: int = 1,
) -> Placement:
    """The best placement of ``grid`` on ``workers``; see :func:`decide`, which also says why."""
    return decide(
        grid,
        workers,
        current=current,
        bytes_of=bytes_of,
        protected=protected,
        most=most,
        alike=alike,
        copies=copies,
    ).placement


def decide(
    grid: Grid,
    workers: Iterable[WorkerSite],
    *,
    current: Placement | None = None,
    bytes_of: BytesOf | None = None,
    protected: bool = True,
    most: int | None = None,
    alike: bool = False,
    copies: int = 1,
) -> Decision:
    """Place ``grid`` on live ``workers`` (one is enough; those left over stand by). Goals: top of this module.

    Args:
        current: what is where now; workers that it names and ``workers`` doesn't are gone. None: nothing is anywhere.
        bytes_of: the bytes of a coordinate's state, a whole number (default: all equal, 1).
        protected: False for no shadows at all.
        most: the most coordinates a worker may host (default: its fair share).
        alike: see ``Placement.alike``; also if ``current`` is.
        copies: shadows of each coordinate; as many as ``current`` has, if that is given.

    Returns the same for the same values, wherever it runs. Raises ValueError for workers that contradict each other,
    for a ``current`` of another grid, for too little room, for bytes that are no whole number from 0 up.
    """
    sites = Sites.of(workers)
    most = _limit(grid, sites, most)
    task = _task(grid, sites, current, bytes_of, most)
    bound = fewest_pairs(grid, sites, most=most)
    if current is None:
        numbers, least, proven = _improved(task, spread(grid, sites, most=most), bound).owners, 0, True
    else:
        numbers, least, proven = _from_current(task, bound)
    owners = {c: sites.workers[number] for c, number in zip(grid, numbers, strict=True)}
    held = {c: tuple(sites.workers[w] for w in held) for c, held in zip(grid, task.held, strict=True)}
    bare = without_shadows(grid, owners, current=current, alike=alike, copies=copies)
    return Decision(
        placement=with_all_shadows(bare, sites, held=held) if protected else bare,
        sites=sites,
        most=most,
        pairs=count_pairs(grid, owners.items(), sites),
        bound=bound,
        bytes_moved=_bytes_moved(task, numbers),
        least_bytes=least,
        proven=proven,
        unit="bytes" if bytes_of is not None else "coordinates",
    )


def _from_current(task: Task, bound: Bound) -> tuple[list[int], int, bool]:
    """Owners near the current ones, a lower bound of the bytes that move, and whether fewer are impossible."""
    kept = keep_most(task.held, task.sizes, workers=len(task.sites), most=task.most)
    least = sum(size for size, worker in zip(task.sizes, kept, strict=True) if worker < 0)
    # Two starts: every live owner stays, and the most bytes stay. The first disturbs fewer coordinates.
    live = [(worker,) if worker >= 0 else () for worker in task.owned]
    still = keep_most(live, task.sizes, workers=len(task.sites), most=task.most)
    found = [_settled(task, still, bound)]
    if kept != still and (not found[0].reached or _bytes_moved(task, found[0].owners) != least):
        found.append(_settled(task, kept, bound))
    if not any(one.reached for one in found):
        dealt = spread(task.grid, task.sites, most=task.most, kept=_kept(task, kept))
        found = [_improved(task, fit(task, dealt, pairs=bound.pairs), bound)]
    owners = min((one.owners for one in found), key=task.cost)
    proven = _bytes_moved(task, owners) == least
    if len(task.held) <= _PROOF_COORDINATES and not (proven and _changed(task, owners) == task.owned.count(-1)):
        better, finished = Proof(task, pairs=bound.pairs, budget=_PROOF_CHOICES).search(owners)
        owners, proven = _improved(task, better, bound).owners, proven or finished
    return owners, least, proven


def _settled(task: Task, kept: Sequence[int], bound: Bound) -> Assignment:
    """The owners in ``kept`` completed and improved, ring by ring in the best order if pairs are left over."""
    assignment = Assignment(task, kept, fewest=bound.pairs)
    assignment.fill()
    assignment.improve()
    if not assignment.reached:
        assignment.rearrange()
        assignment.improve()
    return assignment


def _improved(task: Task, owners: Sequence[int], bound: Bound) -> Assignment:
    assignment = Assignment(task, owners, fewest=bound.pairs)
    assignment.improve()
    return assignment


# A proof is tried for small grids only, and given up after so many choices (a fraction of a second).
_PROOF_COORDINATES = 32
_PROOF_CHOICES = 10_000


def _task(grid: Grid, sites: Sites, current: Placement | None, bytes_of: BytesOf | None, most: int) -> Task:
    number = {worker: index for index, worker in enumerate(sites.workers)}
    if current is None:
        empty: list[tuple[int, ...]] = [() for _ in grid]
        return Task.of(grid, sites, most=most, held=empty, owned=[-1] * len(grid), sizes=[0] * len(grid))
    if current.grid != grid:
        raise ValueError(
            f"the current placement is of {current.grid.pipelines} x {current.grid.stages} coordinates and not of "
            f"{grid.pipelines} x {grid.stages}; the grid of a job never changes: give the placement of this job"
        )
    owner, has = dict(current.owners), current.all_copies()
    held = [tuple(number[w] for w in has[c] if w in number) for c in grid]
    owned = [number.get(owner[c], -1) for c in grid]
    return Task.of(grid, sites, most=most, held=held, owned=owned, sizes=[_size(c, bytes_of) for c in grid])


def _size(coordinate: Coordinate, bytes_of: BytesOf | None) -> int:
    if bytes_of is None:
        return 1
    size = bytes_of[coordinate] if isinstance(bytes_of, Mapping) else bytes_of(coordinate)
    if not isinstance(size, int) or size < 0:
        raise ValueError(f"the bytes of {coordinate} are {size!r}; they have to be a whole number, 0 or more")
    return size


def _limit(grid: Grid, sites: Sites, most: int | None) -> int:
    fair = -(-len(grid) // len(sites))
    if most is None:
        return fair
    if most < fair:
        raise ValueError(
            f"at most {most} coordinates each on {len(sites)} workers are less than the {len(grid)} of the grid; "
            f"allow {fair} or more, or leave the limit out"
        )
    return most


def _bytes_moved(task: Task, owners: Sequence[int]) -> int:
    return sum(size for c, size in enumerate(task.sizes) if owners[c] not in task.held[c])


def _changed(task: Task, owners: Sequence[int]) -> int:
    return sum(worker != before for worker, before in zip(owners, task.owned, strict=True))


def _kept(task: Task, kept: Sequence[int]) -> list[int]:
    """Coordinates that each node would keep."""
    count = [0] * len(task.sites.nodes)
    for worker in kept:
        if worker >= 0:
            count[task.sites.node[worker]] += 1
    return count
