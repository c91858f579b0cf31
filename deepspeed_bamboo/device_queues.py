"""How many queues a GPU may have: CUDA_DEVICE_MAX_CONNECTIONS, which scripts for tensor parallelism set to 1."""

from __future__ import annotations

from collections.abc import Mapping

VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
_QUEUES = 8  # what CUDA has where nobody says otherwise


def few_queues(environment: Mapping[str, str]) -> tuple[str, str] | None:
    """What is wrong with the variable in ``environment``, and the remedy; None where nothing is."""
    value = environment.get(VARIABLE, "")
    if not value.isdecimal() or int(value) >= _QUEUES:
        return None
    return (
        f"{VARIABLE} is {value}: transfers and passes that share a queue of the GPU wait for each other, and workers "
        "that send to each other may wait for ever",
        f"unset {VARIABLE}, or set it to {_QUEUES} or more (1 is for tensor parallelism, which pipelines of the plugin "
        "don't have)",
    )
