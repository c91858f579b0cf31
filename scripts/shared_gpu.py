"""Several workers on one GPU, for benchmarks of memory and of equal results where no more GPUs are to be had.

NCCL refuses two workers on one GPU. So here their tensors travel through the host, by gloo, and times say nothing.
"""

from __future__ import annotations

import os

TOLD = "BENCH_SHARE_GPU"


def share_gpu_if_told() -> bool:
    """Put this worker on the first GPU, without anything that needs NCCL, if the environment says so."""
    if os.environ.get(TOLD) != "1":
        return False
    os.environ["LOCAL_RANK"] = "0"
    import deepspeed
    import deepspeed.runtime.pipe.p2p as stock_messages
    import torch

    from deepspeed_bamboo.runtime.links import Links

    Links._without_lanes = lambda self, peers: []  # type: ignore[method-assign]
    # Stock tries them in its constructor; the plugin never uses them.
    stock_messages.send = stock_messages.recv = lambda tensor, stage, async_op=False: None
    stock = deepspeed.init_distributed

    def init_distributed(*args: object, **kwargs: object) -> None:
        if not torch.distributed.is_initialized():
            # DeepSpeed would bind the group to the GPU, which makes torch ask gloo for what only NCCL can.
            torch.distributed.init_process_group("gloo")
        stock(*args, **{**kwargs, "dist_backend": "gloo"})

    deepspeed.init_distributed = init_distributed
    return True
