"""What DeepSpeed would write into a checkpoint, kept in host memory, to be written while training goes on."""

from __future__ import annotations

import io
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo, CheckpointEngine


class CapturedFiles(CheckpointEngine):  # type: ignore[misc]
    """In the place of an engine's ``checkpoint_engine``: ``files`` has what was saved, by path.

    A file is exactly what ``torch.save`` writes, made at once: nothing in it changes with the next step.
    """

    def __init__(self) -> None:
        super().__init__()
        self.files: dict[str, io.BytesIO] = {}

    def create(self, info: CheckpointCommitInfo) -> None:
        """Nothing has to be prepared."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """There are no directories."""

    def save(self, state_dict: Any, path: str) -> None:
        """Keep ``state_dict`` as the file ``path``."""
        buffer = io.BytesIO()
        torch.save(state_dict, buffer)
        self.files[path] = buffer

    def load(self, path: str, map_location: Any = None) -> Any:
        """What was kept as ``path``. Raises KeyError when nothing was."""
        self.files[path].seek(0)
        return torch.load(self.files[path], map_location=map_location, weights_only=False)

    def commit(self, info: CheckpointCommitInfo) -> bool:
        """Whoever has the files decides when they count."""
        return True
