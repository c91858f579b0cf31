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
    assert again.step == 40 and again.returned(0) == (None, None) and again.returned(2) is None
    path, found = again.returned(1) or ("", {})
    assert path == "own/tag" and found.keys() == {"seen", "pair", 3} and found["pair"] == (1, 2)
    assert torch.equal(found[3]["rng"], state[3]["rng"])


def test_a_later_load_moves_the_beginning_and_is_not_returned() -> None:
    beginning = Beginning()
    beginning.note(("own", {}), before=0, after=40)
    beginning.note(("own", {}), before=57, after=40)  # 17 steps of data are used by then
    beginning.note(("own", {}), before=40, after=57)
    assert beginning.step == 40 and len(beginning.loads) == 1


def test_what_cannot_be_given_again_is_named() -> None:
    beginning = Beginning()
    warning = beginning.note(("own", {"seen": 4, "mine": Own()}), before=0, after=4)
    assert "'mine' (a Own)" in warning and "own" in warning
    assert through(beginning).returned(0) == ("own", {"seen": 4})
    assert "larger than 256 KB" in Beginning().note(("own", {"rng": torch.zeros(10**6)}), before=0, after=4)
