"""Real text as training samples: bytes of a file or a folder, cut into windows.

Sample k is a function of the text, the seed and k alone, for every k from 0 up: within one pass over
the text each window comes once, in an order of that pass's own; behind its end the next pass begins.
"""

from __future__ import annotations

import math
import os
import random
import sysconfig
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

MASK_TOKEN = 256
_IGNORED = -100
_MASKED_SHARE = 0.15
_LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"})


def read_text(path: str | os.PathLike[str] | None = None) -> bytes:
    """The bytes to train on: of a file, or of all files in a folder in the order of their names.

    None: the Python standard library's own sources, which are on every machine.
    Raises ValueError for a path that isn't there or holds no bytes.
    """
    if path is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        files = [file for file in root.rglob("*.py") if not _LEFT_OUT.intersection(file.relative_to(root).parts)]
    else:
        root = Path(path)
        if not root.exists():
            raise ValueError(f"there is no file or folder {root} to train on; check the path")
        files = [root] if root.is_file() else [file for file in root.rglob("*") if file.is_file()]
    text = b"".join(file.read_bytes() for file in sorted(files, key=lambda file: file.relative_to(root).as_posix()))
    if not text:
        raise ValueError(f"there is nothing to train on in {root}; name a file or folder with text")
    return text


class TextWindows(Dataset[tuple[Tensor, Tensor]]):
    """Windows of text, for predicting each next byte or, ``masked``, the bytes that were hidden."""

    def __init__(self, text: bytes, *, sequence_length: int, seed: int = 0, masked: bool = False) -> None:
        """Raises ValueError for a text with less than one window."""
        self._text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._sequence_length = sequence_length
        self._seed = seed
        self._masked = masked
        self._windows = (len(text) - 1) // sequence_length
        if self._windows < 1:
            raise ValueError(
                f"{len(text)} bytes of text are less than one sample of {sequence_length + 1}; train on more text"
            )

    def __len__(self) -> int:
        """Windows in one pass over the text; samples go on behind it."""
        return self._windows

    def __getitem__(self, k: int) -> tuple[Tensor, Tensor]:
        """Sample ``k``: input and label, [S] int64 each."""
        start = self.window(k) * self._sequence_length
        window = self._text[start : start + self._sequence_length + 1].long()
        if self._masked:
            return self._hide(window[:-1], k)
        return window[:-1], window[1:]

    def window(self, k: int) -> int:
        """Which window sample ``k`` is: in every pass a permutation x -> (a x + b) mod windows."""
        if k < 0:
            raise IndexError(f"sample {k} doesn't exist; samples count from 0")
        index_of_pass, position = divmod(k, self._windows)
        numbers = random.Random(f"{self._seed}/{index_of_pass}")
        factor = numbers.randrange(self._windows)
        while math.gcd(factor, self._windows) != 1:
            factor = numbers.randrange(self._windows)
        return (factor * position + numbers.randrange(self._windows)) % self._windows

    def _hide(self, window: Tensor, k: int) -> tuple[Tensor, Tensor]:
        numbers = random.Random(f"{self._seed}/mask/{k}")
        hidden = torch.tensor([numbers.random() < _MASKED_SHARE for _ in range(len(window))])
        hidden[numbers.randrange(len(window))] = True
        return window.masked_fill(hidden, MASK_TOKEN), window.masked_fill(~hidden, _IGNORED)
