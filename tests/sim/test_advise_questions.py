"""Ten questions and more to the command, on a job so small that every option can be reckoned by hand.

Two layers that take 0.1 s forward and 0.2 s backward, 8 samples a step, 3,600 steps: hours are seconds of a step, and
95 s until the first one. Machines that are never taken; $1 an hour, on demand $2.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deepspeed_bamboo.cli.main import main
from deepspeed_bamboo.core.grid import Grid
from deepspeed_bamboo.core.placement import Placement
from deepspeed_bamboo.core.timing import Profile, iteration_seconds

FORWARD, BACKWARD, SAMPLES, STEPS = 0.1, 0.2, 8, 3600
START_HOURS = (45 + 20 + 30) / 3600
LAZY_OVERHEAD = 0.08
LAYER = {"forward_seconds": FORWARD, "backward_seconds": BACKWARD, "parameters": 0, "output_bytes": 0}
PROFILE = {"name": "tiny", "layers": [LAYER] * 2, "micro_batch_samples": 1, "link_bytes_per_second": 1e9}
MODEL = {"name": "tiny", "samples_per_step": SAMPLES, "steps": STEPS, "profile": "profile.json", "parameters": 1}
MARKET = {"removal_probability": 0.0, "addition_probability": 1.0, "dollars_per_hour": 1.0}
ON_DEMAND = {"machines": 2, "dollars_per_hour": 2.0, "step_milliseconds": 2700, "grid": [1, 2]}
POLICIES = {
    "live": {"pipelines": 1, "stages": 2, "lazy_overhead": LAZY_OVERHEAD, "start_seconds": 30, "join_seconds": 20},
    "on_demand": ON_DEMAND,
}

ALL = ["--grids", "1x2,2x2", "--machines", "1,2,4"]
Answer = tuple[str, str, int]  # mode, grid, machines


def ask(folder: Path, options: list[str], market: dict[str, float] | None = None) -> dict[str, Any]:
    """What `ds_bamboo advise` answers, as JSON."""
    (folder / "profile.json").write_text(json.dumps({**PROFILE, "handover_seconds": 0.0}), encoding="utf-8")
    changed = {**MARKET, **(market or {})}
    scenario = {"model": MODEL, "market": changed, "policies": POLICIES, "run": {"limit_hours": 24}}
    (folder / "tiny.json").write_text(json.dumps(scenario), encoding="utf-8")
    command = ["advise", "--scenario", str(folder / "tiny.json"), "--seeds", "1", "--json", str(folder / "out.json")]
    status = main([*command, *options])
    answer: dict[str, Any] = json.loads((folder / "out.json").read_text(encoding="utf-8"))
    assert status == (0 if answer["chosen"] else 1)
    return answer


def named(option: dict[str, Any]) -> Answer:
    return option["mode"], f"{option['pipelines']}x{option['stages']}", option["machines"]


@pytest.mark.parametrize(
    ("options", "market", "answer"),
    [
        # One machine has no bubbles, and waits alone for the start: 4.8 s a step.
        ([*ALL], {}, ("off", "2x2", 1)),
        # A pipeline each: 2.4 s.
        ([*ALL, "--deadline-hours", "4"], {}, ("off", "2x2", 2)),
        # (4 + 1) passes of 0.3 s: 1.5 s.
        ([*ALL, "--deadline-hours", "2"], {}, ("off", "2x2", 4)),
        ([*ALL, "--deadline-hours", "1.4"], {}, None),
        # $6.11 are not too much for the fastest, $5 are too little for it, $4.84 for all but one, $4.50 for all.
        ([*ALL, "--budget-dollars", "10"], {}, ("off", "2x2", 4)),
        ([*ALL, "--budget-dollars", "5"], {}, ("off", "2x2", 2)),
        ([*ALL, "--budget-dollars", "4.84"], {}, ("off", "2x2", 1)),
        ([*ALL, "--budget-dollars", "4.5"], {}, None),
        ([*ALL, "--deadline-hours", "3", "--budget-dollars", "5.5"], {}, ("off", "2x2", 2)),
        # Of lazy and on demand: 2.4 s x 1.08 are in time, and cost less than 2.7 s at twice the price.
        ([*ALL, "--modes", "lazy,on-demand", "--deadline-hours", "2.8"], {}, ("lazy", "2x2", 2)),
        # (8 + 1) passes of 0.3 s, x 1.08: 2.94 h.
        (["--grids", "1x2", "--machines", "1,2", "--modes", "lazy", "--deadline-hours", "3"], {}, ("lazy", "1x2", 2)),
        # No machines come on the spot market.
        ([*ALL, "--deadline-hours", "9"], {"addition_probability": 0.0}, ("on-demand", "1x2", 2)),
        # The spot market is dearer.
        ([*ALL], {"dollars_per_hour": 3.0}, ("on-demand", "1x2", 2)),
    ],
)
def test_questions_with_known_answers(
    options: list[str], market: dict[str, float], answer: Answer | None, tmp_path: Path
) -> None:
    found = ask(tmp_path, options, market)
    assert (named(found["chosen"]["option"]) if found["chosen"] else None) == answer


def test_every_option_is_what_enumeration_says(tmp_path: Path) -> None:
    """Of all placements the best one, by hand: hours and dollars of each option."""
    found = {named(one["option"]): one for one in ask(tmp_path, ALL)["options"]}
    expected = {(mode, grid, count): hours for mode, grid, count, hours in enumerated()}
    assert found.keys() == {*expected, ("on-demand", "1x2", 2)}
    for key, hours in expected.items():
        assert found[key]["hours"] == pytest.approx(hours, rel=1e-3), key
        assert found[key]["dollars"] == pytest.approx(hours * key[2], rel=1e-3), key
    on_demand = found["on-demand", "1x2", 2]
    assert on_demand["hours"] == pytest.approx(2.7 + 45 / 3600, rel=1e-3)
    assert on_demand["dollars"] == pytest.approx(on_demand["hours"] * 2 * 2.0, rel=1e-3)


def enumerated() -> Iterator[tuple[str, str, int, float]]:
    """Mode, grid, machines and hours of every option on spot machines."""
    for pipelines, count in itertools.product((1, 2), (1, 2, 4)):
        grid, profile = Grid(pipelines, 2), Profile((FORWARD,) * 2, (BACKWARD,) * 2)
        seconds = min(
            iteration_seconds(
                Placement.of(grid, owners=dict(zip(grid, owners, strict=True)), shadows={}),
                profile,
                micro_batches=SAMPLES // pipelines,
            )
            for owners in itertools.product([f"w{number}" for number in range(count)], repeat=len(grid))
        )
        modes = {"lazy": 1.0 + LAZY_OVERHEAD, "eager": 1.0 + LAZY_OVERHEAD, "off": 1.0}
        for mode, factor in modes.items():
            if mode != "off" or pipelines > 1:
                yield mode, f"{pipelines}x2", count, seconds * factor * STEPS / 3600 + START_HOURS


def test_the_answer_says_what_it_assumes(tmp_path: Path) -> None:
    said = ask(tmp_path, ALL)["assumptions"]
    for words in ("$1 a machine-hour", "odds of 0 an hour", "the profile profile.json", "none of them measured"):
        assert words in said
