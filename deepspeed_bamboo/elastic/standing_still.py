"""What an agent does about a worker that stands still, its own or another's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepspeed_bamboo.coordination import JobFailure
from deepspeed_bamboo.core.placement import WorkerId
from deepspeed_bamboo.elastic.decisions import Action, KillWorker, PublishHang, Say, Stuck, WentOn
from deepspeed_bamboo.elastic.hang_watch import HangAction
from deepspeed_bamboo.elastic.slot import Slot


def facts_of(event: Stuck, slot: Slot) -> dict[str, Any]:
    """The facts that all agents get."""
    hang = event.hang
    return {
        "rank": slot.rank,
        "node": slot.node,
        "doing": hang.doing,
        "step": hang.step,
        "seconds": round(hang.seconds, 1),
        "waiting": hang.waiting,
        "stack": event.stack,
    }


def in_words(worker: WorkerId, facts: Mapping[str, Any]) -> str:
    """``facts`` as text; the stack on lines of its own."""
    what = "has waited for other workers" if facts["waiting"] else "has stood still"
    text = (
        f"worker {worker} (rank {facts['rank']} on {facts['node']}) {what} for {facts['seconds']:.0f} s in step "
        f"{facts['step']}, in {facts['doing']}"
    )
    stack = str(facts["stack"])
    return f"{text}; its main thread is here, innermost call first:\n{stack}" if stack else text


def on_stuck(event: Stuck, slot: Slot, *, action: HangAction) -> list[Action]:
    """Tell everybody, and end the worker if the settings say so, so that the job continues. See :func:`ending`."""
    facts = facts_of(event, slot)
    actions: list[Action] = [Say(in_words(event.worker, facts)), PublishHang(event.worker, facts)]
    if action == "drain" and event.hang.is_fault:
        actions += [
            Say(f"worker {event.worker} is ended, so that the job continues without it (hangs.action)"),
            KillWorker("it stood still"),
        ]
    return actions


def ending(event: Stuck, slot: Slot) -> JobFailure:
    """The failure of a job that ends because of it."""
    message = f"{in_words(event.worker, {**facts_of(event, slot), 'stack': ''})} (hangs.action is end)"
    return JobFailure(worker=event.worker, kind="hang", message=message, traceback="")


def on_went_on(event: WentOn) -> list[Action]:
    """It has continued."""
    return [Say(f"worker {event.worker} continues, after {event.seconds:.0f} s"), PublishHang(event.worker, None)]
