"""Parallel text as training samples for a translator: line n of one file is the translation of line n of another."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.data import Dataset

from deepspeed_bamboo.models.order import Order

PADDING, UNKNOWN, BEGIN, END = 0, 1, 2, 3
_SPECIAL = 4


class Vocabulary(Protocol):
    """Turns a line of text into tokens."""

    size: int

    def encode(self, line: bytes) -> list[int]:
        """The tokens of ``line``, all below ``size`` and none of them PADDING, BEGIN or END."""


class ByteVocabulary:
    """Each byte is a token."""

    size = 256 + _SPECIAL

    def encode(self, line: bytes) -> list[int]:
        """One token a byte."""
        return [byte + _SPECIAL for byte in line]


class WordVocabulary:
    """The words of a file, one a line, such as the subwords of byte-pair encoding; text has spaces between them."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Raises ValueError for a file that isn't there or is empty."""
        words = [line.split()[0] for line in _lines(path) if line.split()]
        self._tokens = {word: number for number, word in enumerate(dict.fromkeys(words), start=_SPECIAL)}
        self.size = len(self._tokens) + _SPECIAL

    def encode(self, line: bytes) -> list[int]:
        """One token a word; UNKNOWN for words that the file doesn't have."""
        return [self._tokens.get(word, UNKNOWN) for word in line.split()]


class ParallelText(Dataset[tuple[tuple[Tensor, Tensor, Tensor], Tensor]]):
    """Samples for gnmt.translation_loss. Sentences that are too long are cut."""

    def __init__(
        self,
        source: Sequence[bytes],
        target: Sequence[bytes],
        *,
        vocabulary: Vocabulary,
        source_length: int,
        target_length: int,
        seed: int = 0,
    ) -> None:
        """Raises ValueError when the two do not have the same number of lines."""
        if len(source) != len(target):
            raise ValueError(
                f"the source has {len(source)} lines and the target {len(target)}; line n must be translated by line n"
            )
        self._pairs = source, target
        self._vocabulary = vocabulary
        self._lengths = source_length, target_length
        self._order = Order(len(source), seed=seed)

    def __len__(self) -> int:
        """Pairs of lines; samples go on behind them, in the next epoch."""
        return len(self._pairs[0])

    def __getitem__(self, k: int) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
        """Sample ``k``: source [S], its length [] and target [T]; what to say, [T]. All int64."""
        index = self._order.place(k).index
        read, said = (
            self._vocabulary.encode(lines[index])[: length - 1]
            for lines, length in zip(self._pairs, self._lengths, strict=True)
        )
        source, target, answer = [*read, END], [BEGIN, *said], [*said, END]
        length = torch.tensor(len(source))
        return (_padded(source, self._lengths[0]), length, _padded(target, self._lengths[1])), _padded(
            answer, self._lengths[1]
        )


def read_pairs(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> tuple[list[bytes], list[bytes]]:
    """The lines of both files. Raises ValueError for one that isn't there or is empty."""
    return _lines(source), _lines(target)


def _lines(path: str | os.PathLike[str]) -> list[bytes]:
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"there is no file {file} to train on; check the path")
    lines = file.read_bytes().splitlines()
    if not lines:
        raise ValueError(f"{file} is empty; name a file with one sentence, or word, a line")
    return lines


def _padded(tokens: list[int], length: int) -> Tensor:
    return torch.tensor(tokens + [PADDING] * (length - len(tokens)))
