"""Several workers on one GPU, for benchmarks of memory and of equal results where no more GPUs are to be had.

NCCL refuses two workers on one GPU. So the tensors of such a pair travel through the host, by gloo, and times say
little. With several GPUs the workers take turns: neighbours are on different ones, and talk by NCCL as usual.
"""

from __future__ import annotations

import os
from typing import Any

TOLD = "BENCH_SHARE_GPU"


def share_gpu_if_told() -> bool:
    """Put this worker on its GPU, with NCCL only to workers on others, if the environment says so."""
    if os.environ.get(TOLD) != "1":
        return False
    import deepspeed
    import deepspeed.runtime.pipe.p2p as stock_messages
    import torch

    own = str(int(os.environ["LOCAL_RANK"]) % max(1, torch.cuda.device_count()))
    os.environ["LOCAL_RANK"] = own
    _open_lanes_between_gpus_only(own)
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


def _open_lanes_between_gpus_only(own: str) -> None:
    from deepspeed_bamboo.runtime.comm.peers import Links

    opened = Links._open_lanes

    def open_lanes(self: Links, peer: str, opening: Any, **kwargs: Any) -> Any:
        with self._store_for(peer) as (store, first):
            # By place in the pair, since a name may be no key.
            store.set(f"gpu/{first}", own)
            other = store.get(f"gpu/{not first}").decode()
        return None if other == own else opened(self, peer, opening, **kwargs)

    Links._open_lanes = open_lanes  # type: ignore[method-assign]
