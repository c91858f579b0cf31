"""scripts/train.py for bench_failover.py: after a loss it waits for the worker that takes the lost one's place.

It waits between two steps, so that kills that are scripted by step find all workers there, however long a worker
takes to start. Options are those of train.py.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import deepspeed
import train
from shared_gpu import share_gpu_if_told

from deepspeed_bamboo.models.catalog import model_named

_LIMIT_SECONDS = 120.0
_LOOK_SECONDS = 0.005


def main() -> int:
    """Train as the process's arguments say. Returns the exit code."""
    share_gpu_if_told()
    arguments = train.parse_arguments()
    train.prepare_torch(arguments)
    deepspeed.init_distributed()
    model = model_named(arguments.model)
    engine = train.build_engine(arguments, model)
    batches = train.build_batches(arguments, model, engine)
    train.train(engine, batches=batches, arguments=arguments, between_steps=waits_for_a_replacement(engine))
    return 0


def waits_for_a_replacement(engine: Any) -> Callable[[], None]:
    """A function that returns once as many workers as the grid has cells are there, taken in or about to be.

    It raises TimeoutError when they are not in time.
    """
    ever_members: set[str] = set()

    def wait() -> None:
        session, deadline = engine.session, time.monotonic() + _LIMIT_SECONDS
        members = session.interruption.active.members
        ever_members.update(members)
        while len(members) + len(_coming(session.present, ever_members)) < len(engine.job_grid):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(members)} workers of {len(engine.job_grid)}, and no more came in time")
            time.sleep(_LOOK_SECONDS)

    return wait


def _coming(present: dict[str, Any], ever_members: set[str]) -> list[str]:
    return [worker for worker, member in present.items() if member.joining and worker not in ever_members]


if __name__ == "__main__":
    sys.exit(main())
