"""ResNet with bottlenecks as a LayerSpec list, layer by layer as in torchvision (stride in the 3 x 3 convolution).

Source: He et al., arXiv 1512.03385.

Shapes: B micro-batch, C channels, H and W height and width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from deepspeed.pipe import LayerSpec
from torch import Tensor, nn
from torch.nn import functional

from deepspeed_bamboo.models.convolutions import Dense
from deepspeed_bamboo.models.seeding import drawn_from, layer_seed

_EXPANSION = 4


@dataclass(frozen=True)
class ResNetSize:
    """The shape of a ResNet. ``depths``: bottlenecks at each resolution; ``width``: channels inside the first."""

    name: str
    image_size: int
    classes: int
    depths: tuple[int, ...]
    width: int


RESNET152 = ResNetSize("resnet152", image_size=224, classes=1000, depths=(3, 8, 36, 3), width=64)
RESNET_TINY = ResNetSize("resnet-tiny", image_size=32, classes=10, depths=(1, 2, 1), width=4)


class Stem(nn.Module):
    """From an image to the first features, at a quarter of its height and width."""

    def __init__(self, outputs: int, *, seed: int) -> None:
        super().__init__()
        with drawn_from(seed):
            self.convolution = _convolution(3, outputs, kernel=7, stride=2)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        """[B, 3, H, W] in any floating-point type -> [B, C, H/4, W/4] in the weights'."""
        x = functional.relu(self.norm(self.convolution(x.to(self.convolution.weight.dtype))))
        return functional.max_pool2d(x, 3, stride=2, padding=1)


class Bottleneck(nn.Module):
    """Three convolutions beside a short cut; the batch norms have running statistics."""

    def __init__(self, inputs: int, width: int, *, stride: int, seed: int) -> None:
        super().__init__()
        outputs = _EXPANSION * width
        with drawn_from(seed):
            self.reduce = _convolution(inputs, width, kernel=1)
            self.middle = _convolution(width, width, kernel=3, stride=stride)
            self.widen = _convolution(width, outputs, kernel=1)
            self.shortcut: nn.Module = nn.Identity()
            if stride != 1 or inputs != outputs:
                fitting = _convolution(inputs, outputs, kernel=1, stride=stride)
                self.shortcut = nn.Sequential(fitting, nn.BatchNorm2d(outputs))
        self.reduce_norm, self.middle_norm = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.widen_norm = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, 4 width, H/stride, W/stride]."""
        y = functional.relu(self.reduce_norm(self.reduce(x)))
        y = functional.relu(self.middle_norm(self.middle(y)))
        return functional.relu(self.widen_norm(self.widen(y)) + self.shortcut(x))


def resnet_layers(size: ResNetSize, *, seed: int = 0) -> list[Any]:
    """The layers of a ResNet for ``PipelineModule``: images [B, 3, H, W] -> scores [B, classes]."""
    layers: list[Any] = [LayerSpec(Stem, size.width, seed=layer_seed(seed, 0))]
    inputs = size.width
    for resolution, depth in enumerate(size.depths):
        width = size.width << resolution
        for index in range(depth):
            stride = 2 if resolution > 0 and index == 0 else 1
            layers.append(LayerSpec(Bottleneck, inputs, width, stride=stride, seed=layer_seed(seed, len(layers))))
            inputs = _EXPANSION * width
    head = {"pool_to": 1, "activate": False, "seed": layer_seed(seed, len(layers))}
    return [*layers, LayerSpec(Dense, inputs, size.classes, **head)]


def _convolution(inputs: int, outputs: int, *, kernel: int, stride: int = 1) -> nn.Conv2d:
    made = nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=False)
    nn.init.kaiming_normal_(made.weight, mode="fan_out", nonlinearity="relu")
    return made
