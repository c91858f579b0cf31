"""When a slot replaces a lost worker."""

from __future__ import annotations

from deepspeed_bamboo.core.placement import WorkerId
from deepspeed_bamboo.elastic.decisions import Action, Say, WakeAfter
from deepspeed_bamboo.elastic.rules import Rules

RESTART = "restart"


def replace_later(rules: Rules, worker: WorkerId, *, attempt: int) -> list[Action]:
    """What to do after the loss of ``worker``, before which this slot has replaced ``attempt`` others."""
    if not rules.max_restarts:
        return []
    if attempt >= rules.max_restarts:
        return [Say(f"worker {worker} is not replaced: {attempt} were replaced before it (topology.max_restarts)")]
    return [WakeAfter(rules.restart_seconds * 2**attempt, RESTART)]
