"""What the loss of each worker costs in time, for ``ds_bamboo plan``: until its stages have moved, and after."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from deepspeed_bamboo.core.placement import Placement
from deepspeed_bamboo.core.placing.sites import Sites, WorkerSite
from deepspeed_bamboo.core.timing import Profile, iteration_seconds

HEADING = ("loss of worker", "stages", "until the boundary", "after it")
_MOST_LOSSES = 32


def loss_times(
    placement: Placement,
    sites: Sites,
    profile: Profile,
    *,
    micro_batches: int,
    measured: bool,
    later: Callable[[Sequence[WorkerSite], Placement], Placement | None],
) -> Iterator[tuple[str, ...]]:
    """A row of HEADING for every worker that hosts something: multiples of an undisturbed iteration, and seconds where
    the profile is ``measured``. None for more than a few dozen workers, which would take long.

    ``later``: where stages go at the boundary on the workers that are left; None: they stay.
    """
    busy = [worker for worker in sites.workers if placement.hosted_by(worker)]
    now = iteration_seconds(placement, profile, micro_batches=micro_batches)

    def shown(seconds: float) -> str:
        return f"{seconds / now:.2f}" + (f" ({seconds:.3g} s)" if measured else "")

    for lost in busy if len(busy) <= _MOST_LOSSES else ():
        hosted = str(len(placement.hosted_by(lost)))
        after, _ = placement.without([lost])
        left = [
            WorkerSite(worker, sites.nodes[node], sites.zones[zone])
            for worker, node, zone in zip(sites.workers, sites.node, sites.zone, strict=True)
            if worker != lost
        ]
        if after is None:
            yield lost, hosted, "FATAL", "FATAL"
            continue
        until = iteration_seconds(after, profile, micro_batches=micro_batches)
        found = later(left, after)
        best = until if found is None else iteration_seconds(found, profile, micro_batches=micro_batches)
        yield lost, hosted, shown(until), shown(min(until, best))


def legend(*, measured: bool) -> tuple[str, ...]:
    """What the columns mean."""
    assumed = (
        "assumed: stages are alike, and backwards take twice as long as forwards; give",
        "--profile for what was measured",
    )
    return ("times of an iteration after a loss, as multiples of an undisturbed one", *(() if measured else assumed))
