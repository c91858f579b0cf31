"""What a script has written by hand before a step, to be written again before that step is done again."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from deepspeed_bamboo.runtime.stock.hyperparameters import Values


@dataclass(frozen=True)
class SetOnRoot:
    """``name`` has become ``now`` on the PipelineModule ``source``; ``before`` is empty where it was not there."""

    source: weakref.ReferenceType[Any]
    name: str
    before: tuple[Any, ...]
    now: Any


@dataclass(frozen=True)
class SetOnSchedule:
    """``name`` of the scheduler that each stage has was ``before``, and has become ``now``.

    ``way``: from the scheduler to the part that has it (``scheduler_parts.py``).
    """

    name: str
    before: Any
    now: Any
    way: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Written:
    """Each part in the order in which it was written.

    ``groups``: optimizers, None for the one that the script holds, and what their parameter groups held; ``clip``:
    bounds of gradients; ``scale``: of the loss, by name; ``root``: attributes of the PipelineModule; ``schedule``: of
    the scheduler.
    """

    groups: tuple[tuple[Any, Values], ...] = ()
    clip: tuple[Any, ...] = ()
    scale: tuple[Mapping[str, Any], ...] = ()
    root: tuple[SetOnRoot, ...] = ()
    schedule: tuple[SetOnSchedule, ...] = ()

    def __bool__(self) -> bool:
        """Whether there is anything."""
        return bool(self.groups or self.clip or self.scale or self.root or self.schedule)

    def __add__(self, later: Written) -> Written:
        """This, and then that."""
        return Written(
            groups=self.groups + later.groups,
            clip=self.clip + later.clip,
            scale=self.scale + later.scale,
            root=self.root + later.root,
            schedule=self.schedule + later.schedule,
        )

    @property
    def nbytes(self) -> int:
        """What the tensors take that are set on the PipelineModule."""
        return sum(tensor.nbytes for change in self.root for tensor in _tensors(change.now))


NOTHING = Written()


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
