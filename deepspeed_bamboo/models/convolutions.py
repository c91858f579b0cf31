"""The layers that VGG and AlexNet share, with torchvision's numbers for the same weights.

Shapes: B micro-batch, C channels, H and W height and width, F features.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from deepspeed_bamboo.models.dropout import dropout_layer
from deepspeed_bamboo.models.seeding import drawn_from

Pool = tuple[int, int]  # window, stride


class Convolution(nn.Module):
    """A convolution, ReLU and, where ``pool`` is given, a maximum over windows."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        kernel: int,
        stride: int = 1,
        padding: int = 0,
        pool: Pool | None = None,
        kaiming: bool,
        seed: int,
    ) -> None:
        """``kaiming``: first weights as He et al. have them and no bias; else torch's default."""
        super().__init__()
        with drawn_from(seed):
            self.convolution = nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=padding)
            if kaiming:
                nn.init.kaiming_normal_(self.convolution.weight, mode="fan_out", nonlinearity="relu")
                nn.init.zeros_(self.convolution.bias)  # type: ignore[arg-type]
        self.pool = pool

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] in any floating-point type -> [B, C', H', W'] in the weights'."""
        x = functional.relu(self.convolution(x.to(self.convolution.weight.dtype)))
        return x if self.pool is None else functional.max_pool2d(x, self.pool[0], stride=self.pool[1])


class Dense(nn.Module):
    """A linear layer with its activation and dropout in a classifier."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        pool_to: int | None = None,
        dropout_before: float = 0.0,
        dropout_after: float = 0.0,
        activate: bool = True,
        std: float | None = None,
        seed: int,
    ) -> None:
        """``pool_to``: the input is an image, which is averaged to that height and width and flattened first.

        ``std``: first weights are normal with it and there is no first bias; None: torch's default.
        """
        super().__init__()
        with drawn_from(seed):
            self.linear = nn.Linear(inputs, outputs)
            if std is not None:
                nn.init.normal_(self.linear.weight, std=std)
                nn.init.zeros_(self.linear.bias)
        self.pool_to = pool_to
        self.activate = activate
        self.before, self.after = dropout_layer(dropout_before), dropout_layer(dropout_after)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] with ``pool_to``, else [B, F] -> [B, F']."""
        if self.pool_to is not None:
            # Where the size is right already, averaging changes nothing, and its backward is not deterministic on GPUs.
            size = (self.pool_to, self.pool_to)
            x = (x if x.shape[2:] == size else functional.adaptive_avg_pool2d(x, size)).flatten(1)
        x = self.linear(self.before(x))
        return self.after(functional.relu(x) if self.activate else x)  # type: ignore[no-any-return]


def class_loss(scores: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy in nats: scores [B, classes], labels [B] int64."""
    return functional.cross_entropy(scores.float(), labels)
