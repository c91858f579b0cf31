"""Which sample comes when: a function of a seed and the sample's number alone, for every number from 0 up.

In one epoch, a pass over the data, each sample comes once, in an order of that epoch's own.
"""

from __future__ import annotations

import hashlib
import math
import random
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Place:
    """The epoch, from 0, and which of the data set's samples."""

    epoch: int
    index: int


class Order:
    """In every epoch a permutation x -> (a x + b) mod count."""

    def __init__(self, count: int, *, seed: int) -> None:
        self._count = count
        self._seed = seed

    def place(self, k: int) -> Place:
        """Of sample ``k``. Raises IndexError for a negative one."""
        if k < 0:
            raise IndexError(f"sample {k} doesn't exist; samples count from 0")
        epoch, position = divmod(k, self._count)
        numbers = random.Random(f"{self._seed}/{epoch}")
        factor = numbers.randrange(self._count)
        while math.gcd(factor, self._count) != 1:
            factor = numbers.randrange(self._count)
        return Place(epoch, (factor * position + numbers.randrange(self._count)) % self._count)


def numbers_of(*name: object) -> torch.Generator:
    """A generator whose numbers depend on ``name`` alone."""
    digest = hashlib.sha256("/".join(map(str, name)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
