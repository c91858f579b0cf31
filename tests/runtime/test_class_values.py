"""What layers count in their classes as they are made."""

from __future__ import annotations

import itertools
import sys

import pytest
import torch
from torch import nn

from deepspeed_bamboo.runtime.stock.class_values import ClassValues, counting_from

made_in_all = 0
IN_ALL = {"made": 70}


class Counted(nn.Module):
    """Numbers itself in four ways."""

    made = 0
    numbers = itertools.count(5)

    def __init__(self) -> None:
        global made_in_all
        super().__init__()
        made_in_all += 1
        cls = type(self)
        cls.made += 1
        cls.late = getattr(cls, "late", 0) + 1
        IN_ALL["made"] += 1
        self.number = (IN_ALL["made"], made_in_all, cls.made, next(cls.numbers), cls.late)


def test_two_stages_in_one_process_count_alike() -> None:
    before = ClassValues.now()
    first = Counted().number
    before.restore()
    assert Counted().number == first
    assert not set(Counted().number) & set(first)


def test_a_replica_leaves_no_trace() -> None:
    before = (made_in_all, dict(ClassValues.now().values)[Counted])
    with pytest.raises(RuntimeError), counting_from(None):
        Counted()
        raise RuntimeError("the layer can't be made")
    assert repr((made_in_all, dict(ClassValues.now().values)[Counted])) == repr(before)


def test_a_replica_counts_from_the_beginning() -> None:
    beginning = ClassValues.now()
    first = Counted().number
    with counting_from(beginning):
        assert Counted().number == first
    assert Counted.made == first[1]


LOSSES: list[object] = []
running: object = 0.0


def test_what_a_script_has_put_there_since_is_left_alone() -> None:
    global running
    beginning, loss = ClassValues.now(), torch.zeros(3)
    LOSSES.extend([loss, loss])
    running = loss
    with counting_from(beginning):
        assert LOSSES == [] and running == 0.0
    assert len(LOSSES) == 2 and all(value is loss for value in LOSSES) and running is loss
    with counting_from(beginning), counting_from(None):
        LOSSES.append(1.0)
    assert len(LOSSES) == 2
    LOSSES.clear()
    running = 0.0


def test_torch_and_deepspeed_are_left_alone() -> None:
    owners = [owner for owner, _ in ClassValues.now().values]
    assert nn.Linear not in owners and sys.modules["torch.nn"] not in owners
