"""VGG-19 and AlexNet as LayerSpec lists, layer by layer as in torchvision.

Sources: Simonyan and Zisserman, arXiv 1409.1556, configuration E; Krizhevsky, arXiv 1404.5997.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from deepspeed.pipe import LayerSpec

from deepspeed_bamboo.models.convolutions import Convolution, Dense, Pool
from deepspeed_bamboo.models.dropout import check_dropout
from deepspeed_bamboo.models.seeding import layer_seed

_COLOURS = 3


@dataclass(frozen=True)
class VggSize:
    """The shape of a VGG. ``blocks``: channels of the convolutions between two poolings."""

    name: str
    image_size: int
    classes: int
    blocks: tuple[tuple[int, ...], ...]
    pool_to: int
    hidden: int
    dropout: float = 0.5


@dataclass(frozen=True)
class AlexNetSize:
    """The shape of an AlexNet. ``channels``: of its five convolutions."""

    name: str
    image_size: int
    classes: int
    channels: tuple[int, int, int, int, int]
    pool_to: int
    hidden: int
    dropout: float = 0.5


VGG19 = VggSize(
    "vgg19",
    image_size=224,
    classes=1000,
    blocks=((64,) * 2, (128,) * 2, (256,) * 4, (512,) * 4, (512,) * 4),
    pool_to=7,
    hidden=4096,
)
VGG_TINY = VggSize(
    "vgg-tiny", image_size=32, classes=10, blocks=((8,), (8,), (16, 16), (16,), (16,)), pool_to=1, hidden=32
)
ALEXNET = AlexNetSize(
    "alexnet", image_size=224, classes=1000, channels=(64, 192, 384, 256, 256), pool_to=6, hidden=4096
)
ALEXNET_TINY = AlexNetSize(
    "alexnet-tiny", image_size=63, classes=10, channels=(8, 12, 16, 12, 12), pool_to=1, hidden=32
)


def vgg_layers(size: VggSize, *, dropout: float | None = None, seed: int = 0) -> list[Any]:
    """The layers of a VGG for ``PipelineModule``: images [B, 3, H, W] -> scores [B, classes].

    ``dropout``: None for the published 0.5. Raises ValueError for a dropout that is no probability.
    """
    dropout = check_dropout(size.dropout if dropout is None else dropout)
    layers: list[Any] = []
    inputs = _COLOURS
    for block in size.blocks:
        for index, outputs in enumerate(block):
            pool: Pool | None = (2, 2) if index == len(block) - 1 else None
            shape = {"kernel": 3, "padding": 1, "pool": pool, "kaiming": True}
            layers.append(LayerSpec(Convolution, inputs, outputs, **shape, seed=layer_seed(seed, len(layers))))
            inputs = outputs
    flat = inputs * size.pool_to**2
    classifier: list[tuple[int, int, dict[str, Any]]] = [
        (flat, size.hidden, {"pool_to": size.pool_to, "dropout_after": dropout}),
        (size.hidden, size.hidden, {"dropout_after": dropout}),
        (size.hidden, size.classes, {"activate": False}),
    ]
    for into, out, settings in classifier:
        layers.append(LayerSpec(Dense, into, out, **settings, std=0.01, seed=layer_seed(seed, len(layers))))
    return layers


def alexnet_layers(size: AlexNetSize, *, dropout: float | None = None, seed: int = 0) -> list[Any]:
    """The layers of an AlexNet for ``PipelineModule``; arguments and errors as in :func:`vgg_layers`."""
    dropout = check_dropout(size.dropout if dropout is None else dropout)
    one, two, three, four, five = size.channels
    convolutions: list[tuple[int, int, dict[str, Any]]] = [
        (_COLOURS, one, {"kernel": 11, "stride": 4, "padding": 2, "pool": (3, 2)}),
        (one, two, {"kernel": 5, "padding": 2, "pool": (3, 2)}),
        (two, three, {"kernel": 3, "padding": 1}),
        (three, four, {"kernel": 3, "padding": 1}),
        (four, five, {"kernel": 3, "padding": 1, "pool": (3, 2)}),
    ]
    classifier: list[tuple[int, int, dict[str, Any]]] = [
        (five * size.pool_to**2, size.hidden, {"pool_to": size.pool_to, "dropout_before": dropout}),
        (size.hidden, size.hidden, {"dropout_before": dropout}),
        (size.hidden, size.classes, {"activate": False}),
    ]
    kinds: list[Any] = [Convolution] * len(convolutions) + [Dense] * len(classifier)
    shapes = [(into, out, {**settings, "kaiming": False}) for into, out, settings in convolutions] + classifier
    return [
        LayerSpec(kind, into, out, **settings, seed=layer_seed(seed, position))
        for position, (kind, (into, out, settings)) in enumerate(zip(kinds, shapes, strict=True))
    ]
