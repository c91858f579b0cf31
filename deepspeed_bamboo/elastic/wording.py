"""An agent's messages about its job."""

from __future__ import annotations

from collections.abc import Iterable

from deepspeed_bamboo.coordination import Drain
from deepspeed_bamboo.core.placement import WorkerId
from deepspeed_bamboo.elastic.decisions import LossSettled
from deepspeed_bamboo.elastic.rules import MAX_RESTARTS


def of_loss(event: LossSettled) -> list[str]:
    """At most one line; none when the job ends because of it, for which there is another message."""
    names, epoch = ", ".join(event.workers), event.epoch
    if event.generation is not None:
        return [
            f"lost {names} before training began ({event.reason}); all workers start again, attempt "
            f"{event.generation + 1} of {MAX_RESTARTS + 1}"
        ]
    if epoch is None:
        return []
    if not epoch.trains:
        return [f"lost {names} ({event.reason or epoch.reason})"]
    continues = f"the job continues in membership epoch {epoch.number}"
    if not set(event.workers) & set(epoch.lost):
        return [f"lost {names}, which had no part in the job; {continues}"]
    return [f"lost {names} ({epoch.reason.removeprefix(f'{names}: ')}); {continues}"]


def of_early_end(suspect: WorkerId, *, reporter: WorkerId, reason: str) -> str:
    """The script of one worker had ended when another could not reach it any more."""
    return (
        f"the script of worker {suspect} had ended (exit code 0) while worker {reporter} still needed it ({reason}); "
        "all workers must run the same number of steps"
    )


def of_drain(drain: Drain, *, comes: bool = False) -> str:
    """A node will be left. ``comes``: it just wants to join, and the request was there before."""
    time = "" if drain.deadline_seconds is None else f" within {drain.deadline_seconds:.0f} s"
    remedy = f"; to have it join, withdraw that: ds_bamboo drain --cancel {drain.node}" if comes else ""
    return f"node {drain.node} is being left{time}: {drain.reason}{remedy}"


def of_etcd_leaving(node: str) -> str:
    """A node that will be left has the job's own etcd."""
    return (
        f"node {node} has the job's own etcd: its agent stays until the others have left, and they end when this "
        "machine goes, with exit code 75. Name an etcd of yours in coordinator.endpoints to leave this machine without "
        "that"
    )


def numbered(noun: str, numbers: Iterable[int]) -> str:
    """``slot 2``, or ``slots 2, 3``."""
    shown = [str(number) for number in numbers]
    return f"{noun}{'' if len(shown) == 1 else 's'} {', '.join(shown)}"
