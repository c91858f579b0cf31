from __future__ import annotations

from typing import Any

import torch

from deepspeed_bamboo.runtime.checkpoint.beginning import Beginning


class Own:
    """What only code can rebuild."""


def through(beginning: Beginning) -> Beginning:
    result = Beginning()
    result.take(beginning.to_json())
    return result


def test_a_load_before_the_first_step_is_returned_again_as_it_was() -> None:
    beginning = Beginning()
    state: dict[str, Any] = {"seen": 40, "pair": (1, 2), 3: {"rng": torch.arange(4)}, "module": "DeepSpeed's"}
    assert beginning.note((None, None), before=0, after=0) == ""
    assert beginning.note(("own/tag", state), before=0, after=40) == ""
    again = through(beginning)
    assert again.first == 40 and again.returned(0, at=40) == (None, None) and again.returned(2, at=40) is None
    path, found = again.returned(1, at=40) or ("", {})
    assert path == "own/tag" and found.keys() == {"seen", "pair", 3} and found["pair"] == (1, 2)
    assert torch.equal(found[3]["rng"], state[3]["rng"])


def test_a_load_in_the_middle_belongs_to_the_call_before_which_it_was() -> None:
    """Of data of 17 steps are used by then."""
    beginning = Beginning()
    beginning.note(("own", {}), before=0, after=40)
    beginning.note(("back", {"k": 1}), before=57, after=40)
    beginning.note(("weights", {}), before=43, after=43)
    beginning.note(("back", {"k": 2}), before=45, after=50)
    again = through(beginning)
    assert again.first == 40 and again.turns == ((57, 40, 1), (62, 50, 1))
    assert [again.returned(0, at=call) for call in (40, 57, 60, 62, 61)] == [
        ("own", {}),
        ("back", {"k": 1}),
        ("weights", {}),
        ("back", {"k": 2}),
        None,
    ]
    assert [again.step_at(call, loads=1) for call in (40, 56, 57, 61, 62, 70)] == [40, 56, 40, 44, 50, 58]
    assert [again.step_at(call, loads=0) for call in (40, 56, 57, 61, 62, 70)] == [40, 56, 57, 44, 45, 58]
    assert [again.call_of(step) for step in (58, 50, 44, 40)] == [70, 62, 61, 57]


def test_a_script_that_begins_with_what_it_saved_after_a_turn_has_its_number_of_calls() -> None:
    beginning = Beginning()
    beginning.note((None, None), before=0, after=0)
    beginning.note(("back", {}), before=7, after=4)
    beginning.resume(beginning.call_of(5), keep=1)
    beginning.note(("saved5", {}), before=5, after=5)
    again = through(beginning)
    assert again.first == 8 and again.returned(0, at=8) == (None, None) and again.returned(1, at=8) == ("saved5", {})
    assert again.call_of(6) == 9 and again.step_at(9, loads=0) == 6


def test_a_script_that_begins_with_what_it_saved_before_a_turn_makes_the_same_calls_again() -> None:
    """It was saved before call 4, its step is the one at which call 7 began, too; its data are those of call 4."""
    beginning = Beginning()
    beginning.note((None, None), before=0, after=0, wanted="own")
    beginning.note(("back", {}), before=7, after=4, wanted="own")
    assert [beginning.call_before(step, saved=saved) for step, saved in ((4, 4), (4, 7), (5, 8), (6, 6))] == [
        4,
        7,
        8,
        6,
    ]
    assert [beginning.call_before(step, saved=saved) for step, saved in ((4, None), (4, 20), (3, 40))] == [7, 7, 3]
    beginning.resume(4, keep=0)
    beginning.note(("saved4", {}), before=4, after=4, call=4)
    again = through(beginning)
    assert (again.first, again.turns) == (4, ((7, 4, 1),))
    assert again.returned(0, at=4) == ("saved4", {}) and again.returned(0, at=7) == ("back", {})
    assert again.returned(1, at=4) is None and [again.step_at(call, loads=1) for call in (4, 6, 7, 9)] == [4, 6, 4, 6]


def test_what_cannot_be_given_again_is_named() -> None:
    beginning = Beginning()
    warning = beginning.note(("own", {"seen": 4, "mine": Own()}), before=0, after=4)
    assert "'mine' (a Own)" in warning and "own" in warning
    assert through(beginning).returned(0, at=4) == ("own", {"seen": 4})
    assert "larger than 256 KB" in Beginning().note(("own", {"rng": torch.zeros(10**6)}), before=0, after=4)


def test_what_an_older_version_has_kept_is_read() -> None:
    beginning = Beginning()
    beginning.note(("own", {"seen": 4}), before=0, after=4)
    older = {"step": 4, "loads": [load.returned for load in beginning.loads]}
    again = Beginning()
    again.take(older)
    assert (again.first, again.returned(0, at=4), again.call_of(9)) == (4, ("own", {"seen": 4}), 9)
