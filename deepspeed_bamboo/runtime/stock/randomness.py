"""Random numbers of a forward: a function of seed, step, pipeline, stage and micro-batch, and of nothing else.

So a redundant forward, a recomputation and activation checkpointing draw what the first forward drew,
and the user's own generators are where the user left them. Where else than in torch's, Python's and numpy's global
generators layers find random numbers is in :mod:`random_sources`.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch

from deepspeed_bamboo.core.grid import Coordinate
from deepspeed_bamboo.runtime.stock.random_sources import RandomSource, sources_of, trackers

_LOOKED_AT = 3  # iterations in which all imports are searched for trackers


def forward_seed(seed: int, *, step: int, coordinate: Coordinate, micro_batch: int, training: bool) -> int:
    """A 63-bit seed from what identifies one forward."""
    return _hashed(f"{seed}/{step}/{coordinate}/{micro_batch}/{'train' if training else 'eval'}")


def _hashed(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


@dataclass(frozen=True)
class GeneratorStates:
    """The states, at one moment, of all generators that a script or the building of a layer may draw from.

    torch's for the host and for ``cuda_device``, Python's, numpy's if that is imported, and those in trackers.
    """

    host: torch.Tensor
    cuda_device: int | None
    cuda: torch.Tensor | None
    python: Any
    numpy: Any
    tracked: tuple[tuple[RandomSource, Any], ...]

    @classmethod
    def now(cls, device: torch.device, *, known: Sequence[RandomSource] | None = None) -> GeneratorStates:
        """``device``: the worker's. ``known``: the trackers, where the caller has searched for them."""
        numpy = sys.modules.get("numpy")
        cuda_device = (device.index or 0) if device.type == "cuda" else None
        return cls(
            host=torch.get_rng_state(),
            cuda_device=cuda_device,
            cuda=None if cuda_device is None else torch.cuda.get_rng_state(cuda_device),
            python=random.getstate(),
            numpy=None if numpy is None else numpy.random.get_state(),
            tracked=tuple((tracker, tracker.state()) for tracker in (trackers() if known is None else known)),
        )

    def restore(self) -> None:
        """Make the generators what they were."""
        torch.set_rng_state(self.host)
        if self.cuda is not None and self.cuda_device is not None:
            torch.cuda.set_rng_state(self.cuda, self.cuda_device)
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)
        for tracker, state in self.tracked:
            tracker.set_state(state)


@contextmanager
def generators_untouched(device: torch.device, *, known: Sequence[RandomSource] | None = None) -> Iterator[None]:
    """Restore torch's, Python's and numpy's global generators, and the states in trackers, at the end.

    ``known``: the trackers, where the caller has searched for them.
    """
    before = GeneratorStates.now(device, known=known)
    try:
        yield
    finally:
        before.restore()


class ModelGenerators:
    """Lends the global generators to the model's passes, and gives them back to the user in between.

    Putting the user's generators aside costs about half a millisecond (numpy's most of all), which would lie
    between the arrival of a micro-batch and its first kernel. So it is done when the first pass begins, and
    undone only where code of the user's runs outside of the model; a pass just seeds.

    Args:
        device: the worker's device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lent: ExitStack | None = None
        self._times = 0
        self._trackers: list[RandomSource] = []
        self._sources: WeakKeyDictionary[torch.nn.Module, tuple[Hashable, list[RandomSource]]] = WeakKeyDictionary()

    def seed(self, seed: int, *, module: torch.nn.Module, activity: Hashable) -> None:
        """Before a forward or backward of ``module``: the generators belong to it, and start from ``seed``.

        ``activity`` says which iteration or evaluation that is. Layers are searched once in each: one that makes its
        generator in a forward draws from it unseeded until the iteration ends, on every worker that does it.
        """
        lent = self._lent or self._lend()
        # torch.manual_seed also notes a stack trace for every kind of device that it never initialised.
        torch.default_generator.manual_seed(seed)
        if self._device.type == "cuda":
            torch.cuda.default_generators[self._device.index or 0].manual_seed(seed)
        random.seed(seed)
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.seed(seed % 2**32)
        for number, source in enumerate((*self._trackers, *self._sources_of(module, activity, lent))):
            source.seed(_hashed(f"{seed}/{number}"), self._device)

    def give_back(self) -> None:
        """The generators are the user's again, as they were when the model got them."""
        lent, self._lent = self._lent, None
        if lent is not None:
            lent.close()

    def _lend(self) -> ExitStack:
        lent = self._lent = ExitStack()
        # Searching all imports takes milliseconds, and this may come once for each micro-batch.
        if self._times < _LOOKED_AT:
            self._times += 1
            self._trackers = trackers()
        lent.enter_context(generators_untouched(self._device, known=self._trackers))
        for _, sources in self._sources.values():
            for source in sources:
                lent.callback(source.set_state, source.state())
        return lent

    def _sources_of(self, module: torch.nn.Module, activity: Hashable, lent: ExitStack) -> list[RandomSource]:
        searched, sources = self._sources.get(module, (None, []))
        if searched != activity:
            sources = sources_of(module)
            self._sources[module] = activity, sources
            for source in sources:
                lent.callback(source.set_state, source.state())
        return sources
