"""fp16 on CPUs, for tests and sweeps without a GPU."""

from __future__ import annotations

from deepspeed.accelerator import get_accelerator


def allow_on_cpus() -> None:
    """Let DeepSpeed train in fp16 on this process's CPU, too.

    DeepSpeed refuses where the CPU has no instructions for it. torch needs none: it computes the same more slowly.
    Changes nothing on GPUs.
    """
    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        accelerator.is_fp16_supported = lambda: True
