"""Scripts of notices: after a time, at an event, when told; and their text form."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from deepspeed_bamboo.cloud.scripted import ScriptedNotice, ScriptedSource, load_script, parse_script
from deepspeed_bamboo.cloud.watcher import NoticeWatcher
from deepspeed_bamboo.errors import ConfigError
from tests.cloud.services import Arrivals


class Clock:
    def __init__(self) -> None:
        self.now_seconds = 50.0

    def __call__(self) -> float:
        return self.now_seconds


def stopped() -> threading.Event:
    """Set, so that poll doesn't wait."""
    event = threading.Event()
    event.set()
    return event


def test_after_seconds_count_from_the_first_poll() -> None:
    clock = Clock()
    source = ScriptedSource(
        [ScriptedNotice(30.0, after_seconds=5.0), ScriptedNotice(9.0, after_seconds=7)], clock=clock
    )
    clock.now_seconds = 100.0
    assert source.poll(stopped()) == []
    clock.now_seconds = 105.0
    (first,) = source.poll(stopped())
    assert first.deadline_seconds == 135.0
    clock.now_seconds = 200.0
    (second,) = source.poll(stopped())
    assert second.deadline_seconds == 209.0
    assert source.poll(stopped()) == []


def test_at_an_event_once() -> None:
    source = ScriptedSource([ScriptedNotice(10.0, at_event="joined"), ScriptedNotice(10.0, at_event="step 3")])
    arrivals = Arrivals()
    with NoticeWatcher(source, arrivals):
        source.happened("nothing that the script knows")
        source.happened("joined")
        arrivals.wait_for(1)
        source.happened("joined")
        source.happened("step 3")
        assert [notice.kind for notice in arrivals.wait_for(2)] == ["preemption", "preemption"]
    assert len(arrivals.notices) == 2


def test_a_fault_gives_a_notice_and_equal_ones_are_each_told() -> None:
    source = ScriptedSource()
    arrivals = Arrivals()
    with NoticeWatcher(source, arrivals):
        for count in (1, 2):
            source.give(seconds=20.0, reason="NOTICE (0, 2) at idle of step 3")
            arrivals.wait_for(count)
    left = arrivals.notices[0].seconds_left()
    assert left is not None and 10 < left <= 20
    assert arrivals.notices[0].reason == "NOTICE (0, 2) at idle of step 3 (notice 1)"


def test_a_short_time_passes_on_the_real_clock() -> None:
    arrivals = Arrivals()
    with NoticeWatcher(ScriptedSource([ScriptedNotice(1.0, after_seconds=0.05)]), arrivals):
        assert arrivals.wait_for(1, within_seconds=2)[0].source == "scripted"


def test_the_list_form(tmp_path: Path) -> None:
    value = [
        {"after_seconds": 5, "seconds": 30},
        {"at_event": "joined", "kind": "rebalance"},
        {"at_event": "x", "seconds": 0, "kind": "maintenance", "reason": "repairs"},
    ]
    expected = (
        ScriptedNotice(30, after_seconds=5),
        ScriptedNotice(None, at_event="joined", kind="rebalance"),
        ScriptedNotice(0, at_event="x", kind="maintenance", reason="repairs"),
    )
    file = tmp_path / "notices.json"
    file.write_text(json.dumps(value), encoding="utf-8")
    assert parse_script(value) == expected
    assert load_script(json.dumps(value)) == expected
    assert load_script(str(file)) == expected


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (7, "write an object"),
        ({"seconds": 3}, "exactly one of after_seconds and at_event"),
        ({"seconds": 3, "after_seconds": 1, "at_event": "x"}, "exactly one"),
        ({"after_seconds": 1}, '"seconds" is missing'),
        ({"after_seconds": -1, "seconds": 3}, "after_seconds -1 must be"),
        ({"after_seconds": 1, "seconds": True}, "seconds True must be"),
        ({"after_seconds": 1, "seconds": float("inf")}, "seconds inf must be"),
        ({"after_seconds": 1, "seconds": 3, "kind": "storm"}, "kinds are preemption"),
        ({"at_event": "", "seconds": 3}, "at_event '' must be"),
        ({"after": 1, "after_seconds": 1, "seconds": 3}, "unknown key 'after'; keys are"),
    ],
)
def test_what_cannot_be_used(item: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_script([{"after_seconds": 1, "seconds": 1}, item])


@pytest.mark.parametrize(
    ("text", "message"), [("nowhere.json", "can't be read"), ("[1", "is no JSON"), ("{}", "put it in")]
)
def test_text_that_is_no_script(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_script(text)
