"""Plans: a whole iteration, or the rest of one that a loss interrupted, by the same function."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from deepspeed_bamboo.core.communication import lower
from deepspeed_bamboo.core.grid import Coordinate
from deepspeed_bamboo.core.ordering import order_passes
from deepspeed_bamboo.core.placement import Placement, WorkerId
from deepspeed_bamboo.core.progress import CoordinateProgress, check_progress, shadow_progress
from deepspeed_bamboo.core.redundancy import Fit, add_redundant_passes
from deepspeed_bamboo.core.schedule import Mode, Plan
from deepspeed_bamboo.core.timeline import Costs


def plan_iteration(
    placement: Placement,
    *,
    micro_batches: int,
    progress: Mapping[Coordinate, CoordinateProgress] | None = None,
    redundant: Mapping[Coordinate, CoordinateProgress] | None = None,
    mode: Mode | str = Mode.LAZY,
    costs: Costs | None = None,
    pipelines: Iterable[int] | None = None,
) -> Plan:
    """What every worker has to execute from ``progress`` to the end of the iteration.

    Without ``progress``, or for coordinates missing in it, from the start. A coordinate whose owner is new
    starts where ``core.recovery.progress_by_holders`` says; its neighbours send it again what they retained, and it
    sends only what they don't have. Survivors repeat nothing.
    ``redundant`` is for ``eager`` and ``full``: of every shadow on its worker, what FRC (``forwards``) and BRC
    (``backwards``) are done; ``core.recovery.progress_by_holders`` selects them, too.
    ``pipelines`` asks for those pipelines (and any that shares a worker with them) only; default: all.
    Raises ValueError for no micro-batches, an unknown mode or pipeline, and progress that can't be.
    """
    plan, _ = _plan(
        placement,
        micro_batches=micro_batches,
        progress=progress or {},
        redundant=redundant or {},
        mode=_checked_mode(mode),
        costs=costs or Costs(),
        pipelines=pipelines,
    )
    return plan


def bubble_fit(
    placement: Placement,
    *,
    micro_batches: int,
    progress: Mapping[Coordinate, CoordinateProgress] | None = None,
    redundant: Mapping[Coordinate, CoordinateProgress] | None = None,
    mode: Mode | str = Mode.EAGER,
    costs: Costs | None = None,
) -> tuple[Fit, ...]:
    """How many redundant passes of such a plan fit into bubbles, per worker. Arguments as plan_iteration."""
    _, fits = _plan(
        placement,
        micro_batches=micro_batches,
        progress=progress or {},
        redundant=redundant or {},
        mode=_checked_mode(mode),
        costs=costs or Costs(),
        pipelines=None,
    )
    return fits


def plan_inference(
    placement: Placement, *, micro_batches: int, costs: Costs | None = None, pipelines: Iterable[int] | None = None
) -> Plan:
    """Forwards only, without a tail, in the order of DeepSpeed's ``InferenceSchedule``. Raises as plan_iteration."""
    plan, _ = _plan(
        placement,
        micro_batches=micro_batches,
        progress={},
        redundant={},
        mode=Mode.INFERENCE,
        costs=costs or Costs(),
        pipelines=pipelines,
    )
    return plan


def _checked_mode(mode: Mode | str) -> Mode:
    try:
        return Mode(mode)
    except ValueError:
        raise ValueError(f"no mode {mode!r}; choose one of {', '.join(m.value for m in Mode)}") from None


def _plan(
    placement: Placement,
    *,
    micro_batches: int,
    progress: Mapping[Coordinate, CoordinateProgress],
    redundant: Mapping[Coordinate, CoordinateProgress],
    mode: Mode,
    costs: Costs,
    pipelines: Iterable[int] | None,
) -> tuple[Plan, tuple[Fit, ...]]:
    check_progress(progress, grid=placement.grid, micro_batches=micro_batches)
    wanted = _with_shared_workers(placement, pipelines)
    coordinates = tuple(Coordinate(d, p) for d in wanted for p in range(placement.grid.stages))
    complete = {c: progress.get(c, CoordinateProgress()) for c in coordinates}
    shadows = _of_shadows(redundant, coordinates, last_stage=placement.grid.stages - 1)
    check_progress(shadows, grid=placement.grid, micro_batches=micro_batches)
    order = dict(
        order_passes(
            placement,
            coordinates=coordinates,
            micro_batches=micro_batches,
            progress=complete,
            mode=mode,
            costs=costs,
        )
    )
    for worker in _holders(placement, coordinates):
        order.setdefault(worker, ())
    full_order, fits = add_redundant_passes(
        order,
        placement=placement,
        coordinates=coordinates,
        micro_batches=micro_batches,
        progress=complete,
        redundant=shadows,
        mode=mode,
        costs=costs,
    )
    programs = lower(
        placement,
        full_order,
        coordinates=coordinates,
        micro_batches=micro_batches,
        progress=complete,
        redundant=shadows,
        mode=mode,
    )
    return Plan(placement, micro_batches, programs, mode, wanted), fits


def _of_shadows(
    redundant: Mapping[Coordinate, CoordinateProgress], coordinates: Iterable[Coordinate], *, last_stage: int
) -> dict[Coordinate, CoordinateProgress]:
    """What the shadow of each of ``coordinates`` has done."""
    shadows = dict.fromkeys(coordinates, CoordinateProgress())
    known = {c: shadow_progress(c, counts, last_stage=last_stage) for c, counts in redundant.items() if c in shadows}
    return {**shadows, **known}


def _holders(placement: Placement, coordinates: Iterable[Coordinate]) -> tuple[WorkerId, ...]:
    """The workers that hold a shadow of one of ``coordinates``, those with second ones last."""
    covered = frozenset(coordinates)
    held = (*placement.shadows, *placement.second_shadows)
    return tuple(dict.fromkeys(worker for c, worker in held if c in covered))


def _with_shared_workers(placement: Placement, pipelines: Iterable[int] | None) -> tuple[int, ...]:
    """``pipelines``, and all that a worker connects with them by what it owns or shadows; in order."""
    everything = range(placement.grid.pipelines)
    if pipelines is None:
        return tuple(everything)
    wanted = set(pipelines)
    unknown = sorted(wanted.difference(everything))
    if unknown or not wanted:
        raise ValueError(f"no pipelines {unknown or 'at all'} to plan; the grid has 0..{len(everything) - 1}")
    held = (*placement.owners, *placement.all_shadows)
    while True:
        workers = {worker for c, worker in held if c.pipeline in wanted}
        connected = {c.pipeline for c, worker in held if worker in workers}
        if connected <= wanted:
            return tuple(sorted(wanted))
        wanted |= connected
