"""What losses of many machines at once did to this project's policies, next to the same job without them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from .jobs import Job
from .results import Summary
from .runner import run_seeds

__all__ = ["BulkOutcome", "compared_with_undisturbed", "said_of_bulk_losses"]

_OWN = "deepspeed-bamboo"


@dataclass(frozen=True)
class BulkOutcome:
    """Means over the seeds of one policy.

    Attributes:
        policy: its name.
        bulk_minutes: in each so many there was a loss of two to all but one machines.
        survived: losses after which no step was done again, bulk or not.
        back_to_memory: after which the survivors went back to copies in their memory.
        back_to_store: after which they went back to the store.
        started_again: after which the job started again.
        redone_steps: in all.
        useful_time: time in which steps were trained that count, of that of the same job without bulk losses.
        samples: that count, likewise.
    """

    policy: str
    bulk_minutes: float
    survived: float
    back_to_memory: float
    back_to_store: float
    started_again: float
    redone_steps: float
    useful_time: float
    samples: float


def compared_with_undisturbed(job: Job, summaries: Sequence[Summary], *, seeds: Sequence[int]) -> Iterator[BulkOutcome]:
    """An outcome for each of this project's policies among ``summaries``, which are of ``job``; none where no machines
    are lost at once.

    Runs the same job with the same seeds without them.
    """
    every = job.scenario.market.bulk_minutes
    own = [summary for summary in summaries if summary.policy.startswith(_OWN)]
    if every is None or not own:
        return
    market = job.scenario.market.model_copy(update={"bulk_minutes": None})
    quiet = replace(job, scenario=job.scenario.model_copy(update={"market": market}))
    for summary, reference in zip(
        own, run_seeds(quiet, policies=[summary.policy for summary in own], seeds=seeds), strict=True
    ):
        to_memory, to_store = summary.mean("back_to_memory"), summary.mean("back_to_store")
        yield BulkOutcome(
            policy=summary.policy,
            bulk_minutes=every,
            survived=summary.mean("failovers"),
            back_to_memory=to_memory,
            back_to_store=to_store,
            started_again=summary.mean("fatal_losses") - to_memory - to_store,
            redone_steps=summary.mean("wasted_steps"),
            useful_time=_ratio(_useful_share(summary), _useful_share(reference)),
            samples=_ratio(_rate(summary), _rate(reference)),
        )


def said_of_bulk_losses(found: BulkOutcome) -> str:
    """In a sentence or two."""
    return (
        f"{found.policy}, 2 to all but one lost at once in each {found.bulk_minutes:g} minutes: useful time "
        f"{found.useful_time:.3f} of that of the same job without such losses, samples {found.samples:.3f}. "
        f"{found.survived:.1f} losses without a step done again, {found.back_to_memory:.1f} back to memory, "
        f"{found.back_to_store:.1f} back to the store, {found.started_again:.1f} started again; "
        f"{found.redone_steps:.1f} steps done again (means of all runs)"
    )


def _useful_share(summary: Summary) -> float:
    return _ratio(summary.mean("useful_hours"), summary.mean("duration_hours"))


def _rate(summary: Summary) -> float:
    return _ratio(summary.mean("samples"), summary.mean("duration_hours"))


def _ratio(one: float, other: float) -> float:
    return one / other if other else 0.0
