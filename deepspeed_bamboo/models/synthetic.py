"""Data for trying a model when there are none: each sample is a function of the seed and its number."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import Dataset

from deepspeed_bamboo.models.order import numbers_of

_SENTENCES = 1000
_LETTERS = b"abcdefghijklmnopqrstuvwxyz"


class SyntheticImages(Dataset[tuple[Tensor, Tensor]]):
    """Noise with a brightness and a place that belong to the class."""

    def __init__(self, *, image_size: int, classes: int, seed: int = 0) -> None:
        self._size, self._classes, self._seed = image_size, classes, seed

    def __getitem__(self, k: int) -> tuple[Tensor, Tensor]:
        """Sample ``k``: image [3, H, W] float32, and its class, int64."""
        numbers = numbers_of(self._seed, "image", k)
        label = torch.randint(self._classes, (), generator=numbers)
        image = 0.5 * torch.randn(3, self._size, self._size, generator=numbers)
        share = float(label + 1) / self._classes
        image[int(label) % 3, : max(1, round(share * self._size))] += 2.0
        return image, label


def synthetic_pairs(seed: int = 0) -> tuple[list[bytes], list[bytes]]:
    """Words of random letters, and the same words backwards."""
    numbers = numbers_of(seed, "sentences")
    lengths = torch.randint(3, 12, (_SENTENCES,), generator=numbers).tolist()
    words = [
        bytes(_LETTERS[place] for place in torch.randint(len(_LETTERS), (length,), generator=numbers).tolist())
        for length in lengths
    ]
    return words, [word[::-1] for word in words]
