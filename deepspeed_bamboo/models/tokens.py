"""Files of tokens as training samples: windows that predict each next token."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from deepspeed_bamboo.models.order import Order, Place

TOKEN_FILES = (".bin", ".npy")
Tokens = NDArray[Any]


def read_tokens(path: str | os.PathLike[str]) -> Tokens:
    """The tokens in a ``.npy`` (one dimension, of integers) or a ``.bin`` (16-bit unsigned integers and nothing else).

    They stay in the file, and are read when they are used. Raises ValueError for a file that is something else.
    """
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"there is no file {file} with tokens to train on; check the path")
    if file.suffix == ".bin":
        if file.stat().st_size % 2 or not file.stat().st_size:
            raise ValueError(
                f"{file} has {file.stat().st_size} bytes, and a .bin holds tokens of 2 bytes; write a .npy"
            )
        return np.memmap(file, dtype=np.uint16, mode="r")
    try:
        tokens = np.load(file, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise ValueError(f"{file} can't be read as a .npy file ({error}); save the tokens with numpy.save") from error
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        raise ValueError(f"{file} holds {tokens.dtype} of shape {tokens.shape}; save one dimension of integers")
    return tokens  # type: ignore[no-any-return]


class TokenWindows(Dataset[tuple[Tensor, Tensor]]):
    """Windows of tokens, one after the other, for predicting each next one."""

    def __init__(self, tokens: Tokens, *, sequence_length: int, vocabulary: int, seed: int = 0) -> None:
        """Raises ValueError for less tokens than one window has."""
        self._windows = count_windows(tokens, sequence_length, beyond=1)
        self._tokens = tokens
        self._sequence_length = sequence_length
        self._vocabulary = vocabulary
        self._order = Order(self._windows, seed=seed)

    def __len__(self) -> int:
        """Windows in one pass over the tokens; samples go on behind it."""
        return self._windows

    def place(self, k: int) -> Place:
        """Which epoch and which window sample ``k`` is."""
        return self._order.place(k)

    def __getitem__(self, k: int) -> tuple[Tensor, Tensor]:
        """Sample ``k``: input and label, [S] int64 each. Raises ValueError for a token that the model lacks."""
        start = self.place(k).index * self._sequence_length
        window = as_tensor(self._tokens[start : start + self._sequence_length + 1], vocabulary=self._vocabulary)
        return window[:-1], window[1:]


def count_windows(tokens: Tokens, length: int, *, beyond: int = 0) -> int:
    """How many windows of ``length`` there are in ``tokens`` before the last ``beyond``. Raises ValueError for none."""
    windows = (len(tokens) - beyond) // length
    if windows < 1:
        raise ValueError(f"{len(tokens)} tokens are less than one sample of {length + beyond}; train on more")
    return windows


def as_tensor(tokens: Tokens, *, vocabulary: int) -> Tensor:
    """``tokens`` as int64. Raises ValueError for one that is not in a vocabulary of that size."""
    least, most = int(tokens.min()), int(tokens.max())
    if least < 0 or most >= vocabulary:
        wrong = least if least < 0 else most
        raise ValueError(
            f"the data hold token {wrong}, and the model has tokens 0 to {vocabulary - 1}; "
            "make the tokens with the model's own vocabulary"
        )
    return torch.from_numpy(tokens.astype(np.int64))
