"""Small models whose first weights depend on a layer's name alone, and their micro-batches."""

from __future__ import annotations

import hashlib
import os
import random
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy
import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.activation_checkpointing.checkpointing import get_cuda_rng_tracker as tracker
from torch import Tensor, nn

WIDTH = 8
VOCABULARY = 16


def generator(*name: object) -> torch.Generator:
    """A generator whose numbers depend on ``name`` alone."""
    digest = hashlib.sha256("/".join(map(str, name)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


class Layer(nn.Module):
    """tanh(Linear), with dropout."""

    def __init__(self, name: str, *, dropout: float = 0.0, bias: bool = True) -> None:
        super().__init__()
        numbers = generator("layer", name)
        self.linear = nn.Linear(WIDTH, WIDTH, bias=bias)
        with torch.no_grad():
            for parameter in self.linear.parameters():
                parameter.copy_((torch.rand(parameter.shape, generator=numbers) - 0.5) / WIDTH**0.5 * 2)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(torch.tanh(self.linear(x.to(self.linear.weight.dtype))))


class NormLayer(Layer):
    """With buffers: batch statistics, and a count of its forwards in training."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return self.norm(super().forward(x))


class AnnealedLayer(Layer):
    """With attributes that its script may set before each step."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.strength = 1.0
        self.shifts = [torch.zeros(())]

    def forward(self, x: Tensor) -> Tensor:
        return self.strength * super().forward(x) + self.shifts[0]


class AverageLayer(Layer):
    """With buffers in any precision: what it has given so far, on which its output depends."""

    def __init__(self, name: str, *, dropout: float = 0.0) -> None:
        super().__init__(name, dropout=dropout)
        self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = super().forward(x)
        if self.training:
            self.average.mul_(0.5).add_(result.detach().mean(dim=0), alpha=0.5)
        return result - self.average


class CountingLayer(AverageLayer):
    """Counts its forwards in a buffer, those of evaluations too; from the third on it has a buffer more."""

    def __init__(self, name: str, *, dropout: float = 0.0) -> None:
        super().__init__(name, dropout=dropout)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if float(self.calls) == 3.0:
            self.register_buffer("late", torch.full((WIDTH,), 0.01), persistent=False)
        late = getattr(self, "late", 0.0)
        return (super().forward(x) + late) * (1 + 0.01 * self.calls.to(x.dtype))


class Table(nn.Module):
    """An embedding that can be tied to a head; what it adds is the first stage's alone, as positions are."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(VOCABULARY, WIDTH, generator=generator("table")) - 0.5)
        self.shift = nn.Parameter(torch.rand(WIDTH, generator=generator("shift")) - 0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.weight[tokens] + self.shift


def as_head(table: Table, x: Tensor) -> Tensor:
    return x @ table.weight.t()


class Pick(nn.Module):
    """[B, S, W] -> [B, W]: what comes before layers that want vectors."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(dim=1)


class Faulty(Layer):
    """Raises in its fifth forward."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        if self.forwards == 5:
            raise ValueError("a bug of the user's")
        return super().forward(x)


class Constant(nn.Module):
    """Sends a floating-point tensor along that has no gradient."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, torch.ones(2, 3)


class Spread(Layer):
    """A tuple of everything that may travel: float, int64 of two sizes, bool, nothing at all, and one tensor twice."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = super().forward(x)
        ids = torch.arange(64, dtype=torch.int64)
        return ids, y, torch.tensor([[1, 2, 3], [4, 5, 6]]), y > 0, y[:0], y


class Inner(Layer):
    """Uses all of the tuple that :class:`Spread` makes, and passes it on."""

    def forward(self, values: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        ids, y, factors, mask, nothing, same = values
        y = super().forward(y + 0.1 * same) * (1 + factors.sum() / 100) + mask.to(y.dtype) * ids[3]
        return ids, y, factors, mask, nothing * 2, y


class Gather(Layer):
    """The end of the tuple."""

    def forward(self, values: tuple[Tensor, ...]) -> Tensor:
        return super().forward(values[1] + values[5] + values[4].sum())


class Score(Layer):
    """The end of a model that returns its loss."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).float().square().mean()


class Penalised(PipelineModule):
    """Reports an additional loss: the squared norm of the parameters of each stage."""

    def get_additional_losses(self) -> OrderedDict[str, Tensor]:
        with torch.no_grad():
            norms = [parameter.square().sum() for parameter in self.parameters()]
        return OrderedDict(penalty=torch.stack(norms).sum())


def squared_error(outputs: Tensor, labels: Tensor) -> Tensor:
    return ((outputs.float() - labels.float()) ** 2).mean()


def token_error(outputs: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs.float().flatten(0, 1), labels.flatten())


def plain(count: int, *, dropout: float = 0.0) -> list[Any]:
    """``count`` layers, [B, W] -> [B, W]."""
    return [LayerSpec(Layer, str(index), dropout=dropout) for index in range(count)]


class Numbered(nn.Linear):
    """Numbers itself by a counter of its class, on which its output depends."""

    made = 0

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        scale = 1.0 + Numbered.made / 8
        self.scaled = lambda x: scale * x
        Numbered.made += 1

    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(super().forward(x))


def drawn(count: int) -> list[Any]:
    """Layers whose first weights are drawn from torch's generator, where it is when they are built, and numbered.

    From 0 in each model, whatever this process has trained before.
    """
    Numbered.made = 0
    return [LayerSpec(Numbered) for _ in range(count)]


def tied_drawn(count: int) -> list[Any]:
    """As :func:`tied`, with first weights as in :func:`drawn`."""
    return [
        TiedLayerSpec("table", nn.Embedding, VOCABULARY, WIDTH),
        *drawn(count),
        TiedLayerSpec("table", nn.Embedding, VOCABULARY, WIDTH, forward_fn=as_head),
    ]


class Sleep(torch.autograd.Function):
    """The identity, which takes ``seconds`` forward and twice that backward."""

    @staticmethod
    def forward(context: Any, x: Tensor, seconds: float) -> Tensor:
        context.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(2.0 * context.seconds)
        return gradient, None


class SleepingLayer(Layer):
    """A layer of known duration, times SLOWNESS."""

    def __init__(self, name: str, seconds: float) -> None:
        super().__init__(name)
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        return Sleep.apply(super().forward(x), self.seconds * SLOWNESS[0])


class Doze(torch.autograd.Function):
    """As Sleep, a millisecond at a time: a process that is stopped now and then takes longer, as with work."""

    @staticmethod
    def forward(context: Any, x: Tensor, seconds: float) -> Tensor:
        context.seconds = seconds
        doze(seconds)
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        doze(2.0 * context.seconds)
        return gradient, None


class DozingLayer(Layer):
    """A layer of known duration, longer in a process that is stopped now and then."""

    def __init__(self, name: str, seconds: float) -> None:
        super().__init__(name)
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        return Doze.apply(super().forward(x), self.seconds)


def doze(seconds: float) -> None:
    """Sleep a millisecond at a time."""
    for _ in range(round(1000.0 * seconds)):
        time.sleep(0.001)


def dozing(count: int) -> list[Any]:
    """Layers of 6 ms each."""
    return [LayerSpec(DozingLayer, str(index), 0.006) for index in range(count)]


SLOWNESS = [1.0]
"""By how much layers of this process sleep longer."""


def sleeping(count: int) -> list[Any]:
    """Layers of 10 ms each."""
    return [LayerSpec(SleepingLayer, str(index), 0.01) for index in range(count)]


def unevenly_sleeping(count: int) -> list[Any]:
    """Layers of 5 to 20 ms."""
    return [LayerSpec(SleepingLayer, str(index), 0.005 * (1 + index % 4)) for index in range(count)]


class DrawingLayer(Layer):
    """Draws from its own generators, and from a state in DeepSpeed's tracker: other ones in each process."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.own = torch.Generator().manual_seed(os.getpid())
        self.numpy, self.legacy = numpy.random.default_rng(os.getpid()), numpy.random.RandomState(os.getpid())
        self.python = random.Random(os.getpid())
        if not tracker().get_states():
            tracker().add("model-parallel-rng", os.getpid())

    def forward(self, x: Tensor) -> Tensor:
        with tracker().fork():
            drawn = torch.rand(x.shape)
        drawn += torch.rand(x.shape, generator=self.own)
        return super().forward(x) + drawn + (self.numpy.random() + self.legacy.rand() + self.python.random())


def drawing(count: int) -> list[Any]:
    """Layers whose random numbers are not from global generators."""
    return [LayerSpec(DrawingLayer, str(index)) for index in range(count)]


def unbiased(count: int) -> list[Any]:
    """As plain, with fewer parameters."""
    return [LayerSpec(Layer, str(index), bias=False) for index in range(count)]


def annealed(count: int) -> list[Any]:
    """Layers whose attributes a script may set."""
    return [LayerSpec(AnnealedLayer, str(index)) for index in range(count)]


def normalised(count: int) -> list[Any]:
    """Layers with buffers."""
    return [LayerSpec(NormLayer, str(index)) for index in range(count)]


def averaged(count: int, *, dropout: float = 0.0) -> list[Any]:
    """Layers with buffers, whose forwards are no longer the same when they are done twice."""
    return [LayerSpec(AverageLayer, str(index), dropout=dropout) for index in range(count)]


def counting(count: int, *, dropout: float = 0.0) -> list[Any]:
    """Layers with buffers that evaluations move, too."""
    return [LayerSpec(CountingLayer, str(index), dropout=dropout) for index in range(count)]


def tied(count: int, *, dropout: float = 0.0) -> list[Any]:
    """Tokens in, scores out, with the embedding's weights used by the head too."""
    return [
        TiedLayerSpec("table", Table),
        *plain(count, dropout=dropout),
        TiedLayerSpec("table", Table, forward_fn=as_head),
    ]


def tied_twice(count: int) -> list[Any]:
    """As :func:`tied`, with another pair of tied layers that ends one stage earlier: the ends tie two, others one."""
    between = plain(count - 2)
    shared = TiedLayerSpec("within", Layer, "within", tied_weight_attr=["linear.weight", "linear.bias"])
    return [
        TiedLayerSpec("table", Table),
        shared,
        *between[:2],
        shared,
        *between[2:],
        TiedLayerSpec("table", Table, forward_fn=as_head),
    ]


def scored(count: int) -> list[Any]:
    """The last layer returns the loss."""
    return [*plain(count - 1), LayerSpec(Score, "score")]


def faulty(count: int) -> list[Any]:
    """The last but one layer raises in its fifth forward."""
    return [*plain(count - 2), LayerSpec(Faulty, "faulty"), LayerSpec(Layer, "last")]


def constant(count: int) -> list[Any]:
    """A stage that sends a float tensor without gradient."""
    return [LayerSpec(Layer, "0"), LayerSpec(Constant), *[LayerSpec(Inner, str(n)) for n in range(count - 2)]]


def mixed(count: int) -> list[Any]:
    """Tuples between all stages."""
    return [LayerSpec(Spread, "0"), *[LayerSpec(Inner, str(n)) for n in range(1, count - 1)], LayerSpec(Gather, "last")]


def ready(count: int) -> list[Any]:
    """Modules that are ready made, functions, and specs."""
    return [Layer("0"), lambda x: x * 2, *plain(count)[2:-1], torch.tanh, Layer("last")]


def vectors(step: int, pipeline: int, micro_batch: int, *, size: int = 2) -> tuple[Tensor, Tensor]:
    """Input and target of one micro-batch, [B, W] each."""
    numbers = generator("vectors", step, pipeline, micro_batch)
    return torch.randn(size, WIDTH, generator=numbers), torch.randn(size, WIDTH, generator=numbers)


def spiked(steps: Sequence[int], step: int, pipeline: int, micro_batch: int) -> tuple[Tensor, Tensor]:
    """As :func:`vectors`, with targets so far away in ``steps`` that gradients overflow in half precision."""
    x, target = vectors(step, pipeline, micro_batch)
    return x, target * (1e9 if step in steps else 1.0)


def tokens(step: int, pipeline: int, micro_batch: int, *, size: int = 2) -> tuple[Tensor, Tensor]:
    """Input and target of one micro-batch, [B, 4] int64 each."""
    numbers = generator("tokens", step, pipeline, micro_batch)
    draw = torch.randint(VOCABULARY, (2, size, 4), generator=numbers)
    return draw[0], draw[1]


def micro_batches(make: Any, *, pipeline: int, first_step: int, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    """An endless iterator of one pipeline's micro-batches, from ``first_step`` on, ``count`` a step."""
    step = first_step
    while True:
        for micro_batch in range(count):
            yield make(step, pipeline, micro_batch)
        step += 1
