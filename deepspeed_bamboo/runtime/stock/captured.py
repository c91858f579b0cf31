"""What DeepSpeed would write into a checkpoint, kept in host memory, to be written while training continues."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any, BinaryIO

import torch
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo, CheckpointEngine

from deepspeed_bamboo.storage.folders import Fill


class CapturedFiles(CheckpointEngine):  # type: ignore[misc]
    """In the place of an engine's ``checkpoint_engine``: ``files`` fills what was saved into a file, by path.

    Everything is copied at once, in less than half the time of writing it: nothing in it changes with the next step.
    """

    def __init__(self) -> None:
        super().__init__()
        self.files: dict[str, Fill] = {}

    def create(self, info: CheckpointCommitInfo) -> None:
        """Nothing has to be prepared."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """There are no directories."""

    def preserves_storage_sharing(self) -> bool:
        """No: every tensor is copied by itself, so views need not be cloned before."""
        return False

    def save(self, state_dict: Any, path: str) -> None:
        """Keep a copy of ``state_dict`` for the file ``path``."""
        copy = host_copy(state_dict)

        def fill(file: BinaryIO) -> None:
            torch.save(copy, file)

        self.files[path] = fill

    def load(self, path: str, map_location: Any = None) -> Any:
        """Nothing is read here. Raises NotImplementedError."""
        raise NotImplementedError(f"{path} is to be written, not to be read")

    def commit(self, info: CheckpointCommitInfo) -> bool:
        """Whoever has the files decides when they count."""
        return True


def host_copy(value: Any) -> Any:
    """A deep copy of ``value``, with every tensor in it on the host and in memory of its own.

    ``value`` is anything that can be pickled, as what is saved must be. A tensor that is there twice is there once in
    the copy.
    """
    buffer, tensors = io.BytesIO(), _Tensors()
    _Copier(buffer, tensors).dump(value)
    buffer.seek(0)
    return _Rebuilder(buffer, tensors.copies).load()


class _Tensors:
    """Copies of tensors, each made once."""

    def __init__(self) -> None:
        self.copies: list[torch.Tensor] = []
        # With the tensors, so that no other one gets the id of one that is gone.
        self._places: dict[int, tuple[int, torch.Tensor]] = {}

    def place(self, tensor: torch.Tensor) -> int:
        """Where in ``copies`` that of ``tensor`` is."""
        if id(tensor) not in self._places:
            copy = tensor.detach().to("cpu", copy=True)
            if isinstance(tensor, torch.nn.Parameter):
                copy = torch.nn.Parameter(copy, requires_grad=tensor.requires_grad)
            self._places[id(tensor)] = (len(self.copies), tensor)
            self.copies.append(copy)
        return self._places[id(tensor)][0]


class _Copier(pickle.Pickler):
    def __init__(self, buffer: io.BytesIO, tensors: _Tensors) -> None:
        super().__init__(buffer, protocol=pickle.HIGHEST_PROTOCOL)
        self._tensors = tensors

    def persistent_id(self, value: Any) -> int | None:
        return self._tensors.place(value) if isinstance(value, torch.Tensor) else None


class _Rebuilder(pickle.Unpickler):
    def __init__(self, buffer: io.BytesIO, copies: Sequence[torch.Tensor]) -> None:
        super().__init__(buffer)
        self._copies = copies

    def persistent_load(self, place: int) -> torch.Tensor:
        return self._copies[place]
