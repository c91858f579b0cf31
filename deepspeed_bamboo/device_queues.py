"""Environment variables that have streams of a GPU share its queues where they must not.

Workers that send to each other would wait for ever if a receive stood behind a send in one queue.
"""

from __future__ import annotations

from collections.abc import Mapping

_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
_LEAST = 8  # what CUDA has where nobody says otherwise
_PRIORITY = "TORCH_NCCL_HIGH_PRIORITY"
_WAIT = "so receives can stand behind sends in a queue of the GPU, and workers that send to each other wait for ever"


def queue_problems(environment: Mapping[str, str]) -> list[tuple[str, str]]:
    """What is wrong with the variables in ``environment``, each with a remedy."""
    problems = []
    value = environment.get(_QUEUES, "")
    if value.isdecimal() and int(value) < _LEAST:
        remedy = f"unset {_QUEUES}, or set it to {_LEAST} or more (1 is for tensor parallelism, which is refused here)"
        problems.append((f"{_QUEUES} is {value}: transfers and passes wait for each other there", remedy))
    value = environment.get(_PRIORITY, "")
    if value not in ("", "0"):
        problems.append((f"{_PRIORITY} is {value}, {_WAIT}", f"unset {_PRIORITY}"))
    return problems
