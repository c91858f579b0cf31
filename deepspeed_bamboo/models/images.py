"""A folder of images as training samples: one folder in it for each class, as ImageNet comes.

Needs Pillow (the extra "images"). Which part of an image a sample shows, and whether it is mirrored, is a function of
the seed, the epoch and the image alone.
"""

from __future__ import annotations

import importlib
import math
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from deepspeed_bamboo.models.order import Order, Place

SUFFIXES = frozenset({".bmp", ".jpeg", ".jpg", ".png", ".ppm", ".webp"})
_MEAN, _DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's images
_AREAS, _RATIOS, _TRIES = (0.08, 1.0), (3 / 4, 4 / 3), 10

Box = tuple[int, int, int, int]  # left, upper, right, lower


class ImageFolder(Dataset[tuple[Tensor, Tensor]]):
    """Images cut at random to ``image_size`` and mirrored at random, normalised, with the number of their class."""

    def __init__(self, folder: str | os.PathLike[str], *, image_size: int, classes: int, seed: int = 0) -> None:
        """Raises ValueError for a folder without such images, with more classes than the model has, or no Pillow."""
        self._open = _pillow().open
        self._files = _images_of(Path(folder), classes=classes)
        self._size = image_size
        self._seed = seed
        self._order = Order(len(self._files), seed=seed)

    def __len__(self) -> int:
        """Images; samples go on behind them, in the next epoch."""
        return len(self._files)

    def place(self, k: int) -> Place:
        """Which epoch and which image sample ``k`` is."""
        return self._order.place(k)

    def __getitem__(self, k: int) -> tuple[Tensor, Tensor]:
        """Sample ``k``: image [3, H, W] float32, and its class, int64. Raises ValueError for an unreadable image."""
        place = self.place(k)
        file, label = self._files[place.index]
        numbers = random.Random(f"{self._seed}/{place.epoch}/{place.index}")
        try:
            with self._open(file) as image:
                picture = image.convert("RGB")
        except (OSError, SyntaxError) as error:
            raise ValueError(
                f"{file} can't be read as an image ({error}); replace or remove it on all machines"
            ) from error
        box = random_box(picture.width, picture.height, numbers)
        pixels = np.asarray(picture.resize((self._size, self._size), box=box))
        image = torch.from_numpy(pixels.copy()).permute(2, 0, 1).float() / 255
        if numbers.random() < 0.5:
            image = image.flip(2)
        mean, deviation = torch.tensor(_MEAN)[:, None, None], torch.tensor(_DEVIATION)[:, None, None]
        return (image - mean) / deviation, torch.tensor(label)


def random_box(width: int, height: int, numbers: random.Random) -> Box:
    """A part of an image: 8 to 100 % of its area, sides at 3:4 to 4:3; in the middle where none fits."""
    for _ in range(_TRIES):
        area = width * height * numbers.uniform(*_AREAS)
        ratio = math.exp(numbers.uniform(*map(math.log, _RATIOS)))
        wide, high = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < wide <= width and 0 < high <= height:
            left, upper = numbers.randint(0, width - wide), numbers.randint(0, height - high)
            return left, upper, left + wide, upper + high
    side = min(width, height)
    left, upper = (width - side) // 2, (height - side) // 2
    return left, upper, left + side, upper + side


def _images_of(folder: Path, *, classes: int) -> list[tuple[Path, int]]:
    """All images with their classes, in the order of names, which is the same on all machines."""
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder} with images to train on; check the path")
    kinds = sorted(entry for entry in folder.iterdir() if entry.is_dir())
    if len(kinds) > classes:
        raise ValueError(f"{folder} has {len(kinds)} folders, one for each class, and the model has {classes} classes")
    files = [
        (file, label)
        for label, kind in enumerate(kinds)
        for file in sorted(kind.rglob("*"))
        if file.suffix.lower() in SUFFIXES
    ]
    if not files:
        raise ValueError(f"there is no image in the folders below {folder}; it needs one folder with images per class")
    return files


def _pillow() -> Any:
    try:
        return importlib.import_module("PIL.Image")
    except ImportError as error:
        raise ValueError(f"images are read with Pillow, which is missing here ({error}); pip install pillow") from error
