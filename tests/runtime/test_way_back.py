"""At the end of a way back: what those who are back report, next to those who are not, if one more worker is lost."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from deepspeed_bamboo.core.consensus import Report, conclude
from deepspeed_bamboo.core.restoring import Kept
from deepspeed_bamboo.runtime.iteration.activity import ActivityState, decode_round
from deepspeed_bamboo.runtime.recovery.restore import Restoring, _Return

CLAIMS = {"a": ("has data",), "b": ("has data",)}
TRAINED = {"a": {"contributions": 1}, "b": {"contributions": 1}}
UNTIL = 5


class OneWorker:
    """On the way back from a loss in activity 7 or, ``behind``, 6: one step is done again, with the number 8."""

    def __init__(self, outer: ActivityState, *, behind: bool) -> None:
        replicas: Any = SimpleNamespace(replicas=lambda: (), activate_shown=lambda: None, shadows=())
        self.worker: Any = SimpleNamespace(
            me="a",
            step=UNTIL - 1,
            is_reporter=False,
            activity=ActivityState(index=8),
            host=replicas,
            agree=lambda value: {"a": value, "b": value},
            perform=self._perform,
            session=SimpleNamespace(log=lambda *_, **__: None, worker="a"),
        )
        history: Any = SimpleNamespace(of=lambda step: SimpleNamespace(written=(), evaluated=0, values=()))
        back: Any = SimpleNamespace(
            history=history,
            writes=SimpleNamespace(write_again=lambda written: None),
            redo=self._redo,
            look_alike=lambda: None,
        )
        self.restoring = Restoring(self.worker, memory=None, transfer=None, world=None, way_back=back)  # type: ignore[arg-type]
        way = _Return(behind, "memory", UNTIL - 1, UNTIL, 3, 8, "lost", ("c",), 0.0, outer=outer)
        self.restoring._returns.append(way)
        self.last = self.worker.activity
        self.meeting: Report | None = None

    def _redo(self) -> None:
        self.worker.activity.rounds.append(TRAINED)
        self.worker.activity.finish()
        self.worker.step += 1

    def _perform(self, kind: str, body: Callable[[], None]) -> None:
        self.worker.activity.kind, self.worker.activity.step = kind, self.worker.step
        self.meeting = self.report()  # of who has not seen its agreement yet
        body()
        self.worker.activity.finish()

    def report(self) -> Report:
        return self.worker.activity.report({}, redundant={}, step=self.worker.step, kept=Kept())


OUTER = {
    "nothing has begun": ActivityState(index=7, previous=[CLAIMS]),
    "an iteration": ActivityState(index=7, kind="train", previous=[CLAIMS], step=UNTIL),
    "shadows are copied": ActivityState(index=7, kind="protect", previous=[TRAINED], step=UNTIL),
}
BEHIND = {
    "the data are told": ActivityState(index=6, kind="data", rounds=[CLAIMS], previous=[TRAINED], step=UNTIL),
    "an iteration is agreed": ActivityState(index=6, kind="train", rounds=[TRAINED], previous=[CLAIMS], step=UNTIL - 1),
}


@pytest.mark.parametrize(
    ("outer", "behind"),
    [*((one, False) for one in OUTER.values()), *((one, True) for one in BEHIND.values())],
    ids=[*OUTER, *BEHIND],
)
def test_who_is_back_and_who_is_not_come_to_one_conclusion(outer: ActivityState, behind: bool) -> None:
    one = OneWorker(dataclasses.replace(outer, rounds=list(outer.rounds)), behind=behind)
    one.restoring.redo(down_to=0)
    back, meeting = one.report(), one.meeting
    assert meeting is not None and meeting.kind is not None
    found = conclude({"a": back, "b": meeting})
    assert found.steps == UNTIL
    # Who is not back yet learns that the meeting is over, and nothing of what it has done again.
    assert found.agreed[meeting.activity]
    assert decode_round(found.agreed[meeting.activity - 1][0]) == TRAINED
    # Who was behind has the same number as the others once its own activity is over.
    if back.activity == meeting.activity:
        one.worker.activity.finish()
    assert one.worker.activity.index == meeting.activity + 1
