"""What one worker does for all of them, and which one that is: a function of an epoch's members and nothing else.

All members know the same list in the same order, so they agree on each role without a message. A loss or a drain
removes a worker and a join appends one, so a role moves only when its worker goes. A stand-by can get any role: no role
may depend on a stage that its worker hosts.
"""

from __future__ import annotations

from collections.abc import Sequence

from deepspeed_bamboo.core.placement import WorkerId


def reporter(members: Sequence[WorkerId]) -> WorkerId:
    """Who writes status for the job, decides on planned changes, and takes and names checkpoints.

    For scripts the one that stands for rank 0 reports, see ``script_ranks.py``.
    """
    return members[0]


def collector(members: Sequence[WorkerId]) -> WorkerId:
    """Who collects the reports of a loss and publishes them as one."""
    return members[0]


def proposer(members: Sequence[WorkerId]) -> WorkerId:
    """Who writes the next epoch of a planned change, or of shadows that were rebuilt. A loss: whoever sees it."""
    return members[0]
