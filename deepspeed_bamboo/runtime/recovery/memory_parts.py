"""Copies of stages in this worker's host memory, each of the state after so many steps."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch

from deepspeed_bamboo.core.grid import Coordinate
from deepspeed_bamboo.runtime.comm.encoding import decode, encode
from deepspeed_bamboo.runtime.recovery.stage_state import PackedState, pack_state
from deepspeed_bamboo.runtime.stock.description import Description
from deepspeed_bamboo.runtime.stock.replica import StageReplica


@dataclass(frozen=True)
class MemoryPart:
    """``coordinate`` after ``step`` steps: ``body`` holds its structure and description as bytes, ``tensors`` the rest,
    on the host."""

    step: int
    coordinate: Coordinate
    body: bytes
    tensors: list[torch.Tensor]

    @property
    def size(self) -> int:
        """In bytes."""
        return len(self.body) + sum(tensor.nbytes for tensor in self.tensors)

    def sha256(self) -> str:
        """Of all of it. Takes about a second for each gigabyte."""
        digest = hashlib.sha256(f"{self.step}/{self.coordinate}/{len(self.body)}/".encode())
        digest.update(self.body)
        for tensor in self.tensors:
            digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
            if tensor.numel():
                digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def state(self) -> tuple[PackedState, Description]:
        """What it is a copy of, and the description of that. Raises MessageError for a body that is none."""
        structure, description = decode(self.body)
        return PackedState(structure, self.tensors), description


@dataclass(frozen=True)
class SealedPart:
    """A part with the sha256 that it had when it was made."""

    part: MemoryPart
    sha256: str

    def is_whole(self) -> bool:
        """Whether it is still what it was."""
        return self.part.sha256() == self.sha256

    def is_of(self, step: int, coordinate: Coordinate) -> bool:
        """Whether it is a copy of ``coordinate`` after ``step`` steps, and still what it was."""
        return (self.part.step, self.part.coordinate) == (step, coordinate) and self.is_whole()

    def to_plain(self) -> tuple[Any, ...]:
        """All but the tensors, as values that can be sent."""
        return self.part.step, self.part.coordinate, self.part.body, self.sha256

    @classmethod
    def from_plain(cls, value: Any, tensors: list[torch.Tensor]) -> SealedPart:
        """Inverse of :meth:`to_plain`."""
        step, coordinate, body, sha256 = value
        return cls(MemoryPart(step, coordinate, body, tensors), sha256)


def copied_part(replica: StageReplica, description: Description, *, step: int) -> MemoryPart:
    """A copy of ``replica`` as it is, in host memory. Raises RuntimeError or MemoryError when that is full."""
    packed = pack_state(replica)
    tensors = [tensor.detach().to("cpu", copy=True) for tensor in packed.tensors]
    return MemoryPart(step, replica.coordinate, encode([packed.structure, description]), tensors)


class MemoryParts:
    """The parts that this worker has. A thread may add to them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._parts: dict[tuple[int, Coordinate], SealedPart] = {}

    def put(self, sealed: SealedPart) -> None:
        """Have one more."""
        with self._lock:
            self._parts[sealed.part.step, sealed.part.coordinate] = sealed

    def get(self, step: int, coordinate: Coordinate) -> SealedPart | None:
        """The part, if it is here."""
        with self._lock:
            return self._parts.get((step, coordinate))

    def remove(self, step: int, coordinate: Coordinate) -> None:
        """Have it no longer."""
        with self._lock:
            self._parts.pop((step, coordinate), None)

    def keep_only(self, steps: Collection[int]) -> None:
        """Let go of all others."""
        with self._lock:
            self._parts = {key: part for key, part in self._parts.items() if key[0] in steps}

    def held(self) -> dict[int, tuple[Coordinate, ...]]:
        """Coordinates by step."""
        with self._lock:
            steps = sorted({step for step, _ in self._parts})
            return {step: tuple(sorted(c for s, c in self._parts if s == step)) for step in steps}

    def size(self) -> int:
        """Of all of them, in bytes."""
        with self._lock:
            return sum(sealed.part.size for sealed in self._parts.values())
