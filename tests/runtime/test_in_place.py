"""Stored states that can't be loaded in a running job."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deepspeed_bamboo.core.checkpointing import CheckpointProgress
from deepspeed_bamboo.core.grid import Coordinate
from deepspeed_bamboo.errors import ShadowError
from deepspeed_bamboo.runtime.checkpoint.in_place import StoredStates

ERRORS = [AssertionError, AttributeError, EOFError, IndexError, KeyError, OSError, RuntimeError, TypeError, ValueError]


@pytest.mark.parametrize("error", [*ERRORS, pickle.UnpicklingError, ShadowError])
def test_whatever_a_load_raises_is_a_problem_of_that_checkpoint(error: type[Exception], tmp_path: Path) -> None:
    @contextmanager
    def local(tag: str) -> Iterator[Path]:
        yield tmp_path

    def load(*_: Any) -> None:
        raise error("odd")

    checkpoints: Any = SimpleNamespace(rounds=None, place=SimpleNamespace(local=local))
    states = StoredStates(SimpleNamespace(), checkpoints, load)  # type: ignore[arg-type]
    problem = states.load(4, [Coordinate(0, 1)], lambda *_: None)  # type: ignore[arg-type, return-value]
    assert problem.startswith(f"{error.__name__}: ") and "odd" in problem


def test_states_of_before_a_load_are_no_way_back_and_those_after_it_are() -> None:
    rounds: Any = SimpleNamespace(progress=CheckpointProgress(kept=(20, 30)))
    states = StoredStates(SimpleNamespace(), SimpleNamespace(rounds=rounds, place=None), lambda *_: None)  # type: ignore[arg-type]
    assert states.known == (20, 30)
    rounds.progress = rounds.progress.gone_back(25)
    states.forget()
    assert states.known == () and states.wanted == ()
    rounds.progress = CheckpointProgress(complete=30, kept=rounds.progress.kept)  # the same step as one of before
    assert states.wanted == (30,)
    rounds.progress = CheckpointProgress(kept=(20, 30))
    assert states.known == (30,)
