"""Steps before which a job waits until somebody outside has done something: the worker's side of it, by files."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_LOOK_EVERY_SECONDS = 0.005


class Gate:
    """A folder in which the job says that it has come to a step, and is told to go on."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def close_before(self, steps: Iterable[int]) -> None:
        """Before the job starts: it is to wait before each of ``steps``."""
        for step in steps:
            (self._folder / f"closed-{step}").touch()

    def is_reached(self, step: int) -> bool:
        """True once the job waits before ``step``."""
        return (self._folder / f"reached-{step}").exists()

    def open(self, step: int) -> None:
        """Let the job go on with ``step``."""
        (self._folder / f"open-{step}").touch()

    def pass_through(self, step: int) -> None:
        """In the job: wait before ``step``, if that is wanted."""
        if not (self._folder / f"closed-{step}").exists():
            return
        (self._folder / f"reached-{step}").touch()
        while not (self._folder / f"open-{step}").exists():
            time.sleep(_LOOK_EVERY_SECONDS)


def gated_worker(argv: list[str]) -> None:
    """In a worker's process: as ``forked.train_worker``, with the gate's folder before the script."""
    from deepspeed_bamboo.runtime.engine import BambooPipelineEngine
    from deepspeed_bamboo.sweep.forked import train_worker

    gate, stock = Gate(Path(argv[0])), BambooPipelineEngine.train_batch

    def train_batch(engine: BambooPipelineEngine, *arguments: Any) -> Any:
        if engine.is_reporter:
            gate.pass_through(engine.global_steps)
        return stock(engine, *arguments)

    BambooPipelineEngine.train_batch = train_batch  # type: ignore[method-assign, assignment]
    train_worker(argv[1:])
