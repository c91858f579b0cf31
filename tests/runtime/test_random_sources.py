"""Trackers of random states are found wherever and whenever a module gets one."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from deepspeed_bamboo.runtime.stock.random_sources import trackers

NAME = "_CUDA_RNG_STATE_TRACKER"


class Tracker:
    """Like Megatron's."""

    def __init__(self, name: str) -> None:
        self.states = {name: torch.zeros(1)}

    def get_states(self) -> dict[str, torch.Tensor]:
        return dict(self.states)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        self.states = states


def found() -> list[str]:
    """The names of the states in trackers, in their order."""
    return [name for tracker in trackers() for name in tracker.state()]


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Imported just now, with a variable for a tracker."""
    made = ModuleType("zz_parallel")
    vars(made)[NAME] = None
    monkeypatch.setitem(sys.modules, made.__name__, made)
    return made


def test_one_that_is_made_after_the_import(module: ModuleType) -> None:
    before = found()
    vars(module)[NAME] = Tracker("late")
    assert found() == [*before, "late"]
    vars(module)[NAME] = Tracker("another")
    assert found() == [*before, "another"]


def test_one_object_that_several_modules_name_comes_once(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    before = found()
    vars(module)[NAME] = Tracker("one")
    for name in ("zz_first", "zz_second"):
        monkeypatch.setitem(sys.modules, name, module)
        assert found() == [*before, "one"]


def test_modules_that_come_and_go(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    vars(module)[NAME] = Tracker("b")
    before = found()
    assert before[-1] == "b"
    other, plain = ModuleType("zz_more"), ModuleType("zz_plain")
    vars(other)[NAME] = Tracker("a")
    monkeypatch.setitem(sys.modules, plain.__name__, plain)
    monkeypatch.setitem(sys.modules, other.__name__, other)
    assert found() == [*before[:-1], "a", "b"]  # by the modules' names
    del sys.modules[module.__name__]
    assert found() == [*before[:-1], "a"]
    monkeypatch.setitem(sys.modules, "zz_unlike", ModuleType("zz_unlike"))
    sys.modules[module.__name__] = module  # with as many modules as before
    assert found() == [*before[:-1], "a", "b"]
    del sys.modules[plain.__name__]
    vars(plain)[NAME] = Tracker("c")
    sys.modules[plain.__name__] = plain
    assert found() == [*before[:-1], "a", "b", "c"]


def test_what_the_running_script_makes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "script" not in found()
    monkeypatch.setitem(vars(sys.modules["__main__"]), NAME, Tracker("script"))
    assert "script" in found()
