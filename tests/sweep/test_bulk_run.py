"""How much of a job's time is useful, from its event log, and when many are lost at once."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_bamboo.sweep.bulk_run import drawn, time_spent


def log(*, slow: dict[int, float], alone_from: int, alone_until: int) -> list[dict[str, Any]]:
    """Sixty steps of half a second; of those of one worker alone of 0.8 s. ``slow``: seconds on top, by step."""
    events, now = [], 100.0
    for step in range(60):
        alone = alone_from <= step < alone_until
        now += (0.8 if alone else 0.5) + slow.get(step, 0.0)
        for worker in range(1 if alone else 2):
            hosted = ["0.0", "0.1"] if alone else [f"0.{worker}"]
            events.append({"event": "step", "step": step, "t": now, "worker": f"w{worker}", "hosted": hosted})
    return events


def test_what_steps_near_a_loss_take_longer_is_lost() -> None:
    struck = [{"event": "restored", "step": 20, "t": 0.0}, {"event": "reconfigured", "step": 40, "t": 0.0}]
    found = time_spent([*log(slow={20: 3.0, 40: 0.5, 50: 9.0}, alone_from=20, alone_until=40), *struck])
    # Steps 0 to 2 are left out; what makes step 50 longer is no loss.
    assert found.steps == 57
    assert found.lost_seconds == pytest.approx(3.5)
    assert found.seconds == pytest.approx(37 * 0.5 + 20 * 0.8 + 12.5)
    assert found.step_seconds == pytest.approx(0.5)
    assert found.useful_share == pytest.approx(1 - 3.5 / 47)
    assert found.samples_share == pytest.approx(57 * 0.5 / 47)


def test_without_losses_all_time_is_useful() -> None:
    assert time_spent(log(slow={}, alone_from=0, alone_until=0)).useful_share == 1.0
    assert time_spent([]).useful_share == 0.0


@given(seed=st.integers(0, 1000), workers=st.integers(3, 8), intervals=st.integers(1, 5))
def test_each_interval_has_one_loss_of_two_to_all_but_one(seed: int, workers: int, intervals: int) -> None:
    losses = drawn(seed, workers=workers, minutes=10.0 * intervals, every_minutes=10.0)
    assert [int(loss.seconds // 600) for loss in losses] == list(range(intervals))
    assert all(2 <= loss.workers < workers for loss in losses)
    assert losses == drawn(seed, workers=workers, minutes=10.0 * intervals, every_minutes=10.0)
