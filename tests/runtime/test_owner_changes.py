"""What a script does to its stages between steps: what looking for it may cost."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from deepspeed_bamboo.core.grid import Coordinate, Grid
from deepspeed_bamboo.core.placement import Placement
from deepspeed_bamboo.runtime.owner_changes import CHANGED, VALUES, OwnerChanges


class _Host:
    """Counts who asks for stages."""

    active = None

    def __init__(self) -> None:
        self.asked = 0

    def owners(self) -> list[Any]:
        return []

    @property
    def owned(self) -> dict[Any, Any]:
        self.asked += 1
        return {}

    def shown(self) -> None:
        """It has no stage."""


class _Worker:
    def __init__(self, *, protects: bool) -> None:
        self.protects, self.host, self.record = protects, _Host(), None


@pytest.mark.parametrize("protects", [True, False])
def test_only_where_there_are_shadows_are_stages_looked_at_after_a_step(protects: bool) -> None:
    worker = _Worker(protects=protects)
    OwnerChanges(cast("Any", worker), transfer=cast("Any", None), past=cast("Any", None)).note()
    assert (worker.host.asked > 0) == protects


@pytest.mark.parametrize("what", [CHANGED, VALUES])
def test_a_loss_before_shadows_had_what_was_changed_is_told(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    """And only such a one: not where nothing was changed, and not where all was well before it."""
    worker: Any = _Worker(protects=True)
    worker.is_reporter, worker.session = True, SimpleNamespace(worker="b")
    worker.record = SimpleNamespace(number=0, lost=(), placement=Placement.initial(Grid(1, 2), ("a", "b")))
    past = SimpleNamespace(forget=lambda: None)
    changes = OwnerChanges(worker, transfer=cast("Any", None), past=lambda: cast("Any", past))
    changes.note()
    worker.record = SimpleNamespace(number=1, lost=("a",), placement=None)
    changes.learn({"b": {}})
    assert "was lost before" not in capsys.readouterr().err
    changes.learn({"b": {what: True}})
    told = capsys.readouterr().err
    assert "a was lost before a shadow had what its script may have changed before the last step" in told
    assert "0.0 goes on with what was there before" in told
    changes.note = lambda: setattr(changes, "_noted", worker.record)  # type: ignore[method-assign]
    changes.note()
    changes.learn({"b": {what: True}})
    assert "was lost before" not in capsys.readouterr().err


def test_from_which_step_on_what_the_script_has_changed_is_there() -> None:
    """At rest it is looked for when it is asked for; within a step, what was seen before it counts."""
    worker: Any = _Worker(protects=True)
    worker.step = 6
    changes = OwnerChanges(worker, transfer=cast("Any", None), past=cast("Any", None))
    seen: list[Any] = []
    changes._changed_since = lambda: list(seen)  # type: ignore[method-assign]
    changes.rest()
    assert changes.redoes_from() == 0
    seen.append("0.1")
    assert changes.redoes_from() == 7, "the state of 6 steps lacks it"
    other = OwnerChanges(worker, transfer=cast("Any", None), past=cast("Any", None))
    other._changed_since = lambda: list(seen)  # type: ignore[method-assign]
    assert other.redoes_from() == 0, "within a step its forwards have moved buffers"
    other._looks = 3
    other.follow()
    seen.clear()
    worker.step = 7
    assert other.redoes_from() == 7, "the step is done, and others have not noted it yet"
    assert "0.1" in other._stale


@pytest.mark.parametrize(("path", "first"), [("", 0), ("0.linear", 7)])
def test_numbers_on_the_pipeline_module_are_set_again_by_every_script_and_those_of_layers_by_their_owners(
    path: str, first: int
) -> None:
    worker: Any = _Worker(protects=True)
    worker.step = 6
    changes = OwnerChanges(worker, transfer=cast("Any", None), past=cast("Any", None))
    changes._values[Coordinate(0, 1)] = {path: {"shift": 0.7}}
    changes.rest()
    assert changes.redoes_from() == first
