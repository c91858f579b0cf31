"""Keeps DeepSpeed on a CPU from building and using its collective over shared memory.

Only inference uses it, it takes half a minute to compile, and a killed worker would leave its segments behind and its
peers spinning on them. Where DeepSpeed has no such op, nothing is done.
"""

from __future__ import annotations

import deepspeed

_NAME = "deepspeed_shm_comm"


def leave_out_shared_memory_op() -> None:
    """Mark the op as one that this machine can't build. The first call asks DeepSpeed about all ops, for 0.2 s."""
    compatible = deepspeed.ops.__compatible_ops__
    if _NAME in compatible:
        compatible[_NAME] = False
