"""The GPUs, and settings of NCCL and of CUDA builds that are known to hurt."""

from __future__ import annotations

import re
from collections.abc import Iterator

from deepspeed_bamboo.device_queues import queue_problems
from deepspeed_bamboo.doctor.finding import Finding, warning
from deepspeed_bamboo.doctor.subject import VISIBLE, Subject

_GIB = 1 << 30
_MUCH_USED_SHARE = 0.1
# The plugin sets these where nobody does; another value stays.
_EXPECTED = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": ("0", "torch would end processes that could continue after a loss"),
    "NCCL_NVLS_ENABLE": ("0", "sums over NVLink switches give other bits from run to run"),
}


def check_gpus(subject: Subject) -> Iterator[Finding]:
    """Checks that there are as many GPUs as the host file says, all alike and empty."""
    if subject.on_cpu:
        return
    gpus = subject.gpus
    if gpus is None:
        yield Finding("nvidia-smi fails", "run it by hand and repair the driver")
        return
    if not gpus and subject.environment.get(VISIBLE) is not None and subject.machine.gpus():
        chosen = subject.environment[VISIBLE]
        yield Finding(f"{VISIBLE} is {chosen!r}, which hides all GPUs", f"unset {VISIBLE}, or name GPUs that are there")
        return
    if not gpus:
        yield Finding("there is no GPU (nvidia-smi not found)", "use a machine with GPUs, or set DS_ACCELERATOR=cpu")
        return
    slots = own_slots(subject)
    if slots is not None and slots > len(gpus):
        yield Finding(
            f"the host file gives this machine {slots} slots, and it has {len(gpus)} GPUs{_chosen(subject)}",
            f"write slots={len(gpus)}, or share GPUs on purpose",
        )
    kinds = sorted({gpu.name for gpu in gpus.values()})
    if len(kinds) > 1:
        yield warning(
            f"the GPUs differ: {', '.join(kinds)}",
            "use GPUs of one kind: other kinds may add in another order, and then runs with and without losses differ",
        )
    for number, gpu in gpus.items():
        if gpu.used_bytes > _MUCH_USED_SHARE * gpu.memory_bytes:
            used, there = gpu.used_bytes / _GIB, gpu.memory_bytes / _GIB
            yield warning(
                f"GPU {number} has {used:.1f} of {there:.1f} GiB in use already",
                "end what runs there (nvidia-smi names it): after a loss a worker needs room for two stages",
            )


def _chosen(subject: Subject) -> str:
    chosen = subject.environment.get(VISIBLE)
    return "" if chosen is None else f" that {VISIBLE} names ({chosen})"


def check_nccl_settings(subject: Subject) -> Iterator[Finding]:
    """Checks environment variables that the plugin would not change."""
    if subject.on_cpu:
        return
    for name, (value, otherwise) in _EXPECTED.items():
        found = subject.environment.get(name)
        if found not in (None, value):
            yield Finding(f"{name} is {found}: {otherwise}", f"unset {name}, or set it to {value}")
    for problem, remedy in queue_problems(subject.environment):
        yield Finding(problem, remedy)
    architectures = subject.environment.get("TORCH_CUDA_ARCH_LIST", "")
    if re.search(r"\d[a-z]", architectures):
        yield Finding(
            f"TORCH_CUDA_ARCH_LIST is {architectures!r}, and DeepSpeed can't read a number followed by a letter there",
            "name your GPUs' architecture without letters, for example 9.0",
        )


def own_slots(subject: Subject) -> int | None:
    """The slots that the host file gives this machine; None where it doesn't name it."""
    machine = subject.machine
    for host in subject.hosts:
        if host.name == machine.host_name() or machine.resolve(host.name) in machine.addresses():
            return host.slots
    return None
