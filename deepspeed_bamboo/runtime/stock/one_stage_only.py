"""Finds what a script has done through its optimizer or scheduler to one stage only, where its worker has several.

The script's optimizer and scheduler show one stage. What it writes into groups and into the scheduler's numbers is
carried to the others (``script_writes.py``, ``schedule_by_hand.py``). What it does to the groups' parameters, to the
optimizer's state, or to other parts of the scheduler is not: nobody can tell which of the others' it would have meant.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from deepspeed_bamboo.runtime.stock.replica import StageReplica
from deepspeed_bamboo.runtime.stock.schedule_by_hand import own_scheduler
from deepspeed_bamboo.runtime.stock.scheduler_parts import parts_of
from deepspeed_bamboo.runtime.stock.state_versions import optimizer_state, weights

_Seen = Mapping[str, str]
_PLAIN = (bool, int, float, str, list, tuple, dict)


class OneStageOnly:
    """Looks at the stages of one worker after each step, and before the next. With one stage there is nothing to do."""

    def __init__(self) -> None:
        self._left: dict[int, _Seen] = {}  # by stage (replica, by id): as the last step left it

    def leave(self, owners: Sequence[StageReplica]) -> None:
        """``owners`` are as nobody but the script will change them up to :meth:`follow`."""
        self._left = {id(replica): _seen(replica) for replica in owners} if len(owners) > 1 else {}

    def forget(self) -> None:
        """Stages get values from elsewhere."""
        self._left = {}

    def follow(self, shown: StageReplica | None, owners: Sequence[StageReplica]) -> str:
        """What to tell the user, "" for nothing: ``shown``, whose optimizer the script has, has changed alone."""
        known = [replica for replica in owners if id(replica) in self._left]
        if shown is None or len(known) < 2 or shown not in known:
            return ""
        changed = {replica.coordinate: _changed(self._left[id(replica)], _seen(replica)) for replica in known}
        others = {what for coordinate, its in changed.items() if coordinate != shown.coordinate for what in its}
        alone = [what for what in changed[shown.coordinate] if what not in others]
        if not alone:
            return ""
        unchanged = ", ".join(str(replica.coordinate) for replica in known if replica is not shown)
        return (
            f"the script has changed {' and '.join(alone)} of stage {shown.coordinate}, and not of {unchanged}, which "
            "this worker has as well. engine.optimizer (parameters of its groups, state, load_state_dict) and the "
            "scheduler are one stage's: if all layers were meant, training differs from now on. Go through "
            "engine.module.parameters(), engine.hosted_optimizers() and engine.hosted_schedulers() for that"
        )


def _seen(replica: StageReplica) -> _Seen:
    seen = {"weights": str(weights(replica)), "optimizer state": optimizer_state(replica)}
    scheduler = own_scheduler(replica)
    if scheduler is not None:  # one of the script's own only one stage has
        # DeepSpeed's keep rates that are not in their state_dict().
        parts = parts_of(scheduler).items()
        kept = {way: {n: v for n, v in held.items() if isinstance(v, _PLAIN)} for way, held in parts}
        seen["the scheduler"] = repr(kept)
    return seen


def _changed(before: _Seen, now: _Seen) -> list[str]:
    return [what for what, value in now.items() if before.get(what, value) != value]
