"""What a run of a codebase has written: its files' tensors, to compare one run with another."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch


def saved_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Each tensor in files of torch's and of safetensors', by file and by place in it. Dates in names are left out."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.rglob("*")):
        if path.suffix in (".pt", ".bin", ".safetensors"):
            found.update(_tensors(_loaded(path), _name(path.relative_to(folder))))
    return found


def differences(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    """What is only in one of them, or not the same to the last bit."""
    missing = sorted(one.keys() ^ other.keys())
    unlike = [name for name in sorted(one.keys() & other.keys()) if not _same(one[name], other[name])]
    return [f"{name} is in one of them only" for name in missing] + [f"{name} differs" for name in unlike]


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return one.contiguous().view(-1).view(torch.uint8).equal(other.contiguous().view(-1).view(torch.uint8))


def _loaded(path: Path) -> Any:
    """A file that the run itself has just written, with whatever objects its script saves."""
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    return torch.load(path, map_location="cpu", weights_only=False)


def _name(path: Path) -> str:
    return "/".join("DATE" if part[:8].isdigit() and "_" in part else part for part in path.parts)


def _tensors(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from _tensors(part, f"{name} {key}")
    elif isinstance(value, list | tuple):
        for index, part in enumerate(value):
            yield from _tensors(part, f"{name} {index}")
