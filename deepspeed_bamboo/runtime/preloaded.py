"""What a fork server imports so that the workers that it forks start at once; for tests and sweeps.

DeepSpeed imports some of it only when an engine is made: three seconds of a core in each worker. This also asks
DeepSpeed which of its ops this machine can build; DeepSpeed runs compilers for that, 0.2 seconds in each worker. Not on
a GPU, which a process must not touch before it forks. And it looks through all modules for what each worker looks for.
"""

from __future__ import annotations

import os

import deepspeed.runtime.zero.muon.muon_optimizer
import torch._dynamo

from deepspeed_bamboo.runtime import catching_up_engine, engine, main
from deepspeed_bamboo.runtime.membership import joining
from deepspeed_bamboo.runtime.stock.patches.shared_memory_op import leave_out_shared_memory_op
from deepspeed_bamboo.runtime.stock.random_sources import trackers
from deepspeed_bamboo.runtime.stock.symbols import require_symbols

__all__ = ["catching_up_engine", "deepspeed", "engine", "joining", "main", "torch"]

if os.environ.get("DS_ACCELERATOR") == "cpu":
    leave_out_shared_memory_op()

require_symbols()
trackers()
