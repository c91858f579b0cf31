"""Advice: questions whose answers are known, in small, and the command."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_bamboo.cli.main import main
from deepspeed_bamboo.sim.advise import Goal, Option, Outcome, outcome_of, recommend
from deepspeed_bamboo.sim.errors import ScenarioError
from deepspeed_bamboo.sim.scenario import load_preset, preset_names

from .common import REPOSITORY

SLOW = Option("lazy", 1, 4, 4)
MIDDLE = Option("lazy", 2, 4, 8)
FAST = Option("lazy", 4, 4, 16)
SAFE = Option("on-demand", 1, 4, 4)


def promised(option: Option, hours: float, dollars: float) -> Outcome:
    return Outcome(option, hours, dollars, dollars, 1.0 if math.isfinite(hours) else 0.5, ((hours, dollars),))


CHOICE = (
    promised(SLOW, 20.0, 100.0),
    promised(MIDDLE, 12.0, 130.0),
    promised(FAST, 8.0, 200.0),
    promised(SAFE, 15.0, 400.0),
)


@pytest.mark.parametrize(
    ("goal", "answer"),
    [
        (Goal(), SLOW),  # the cheapest
        (Goal(deadline_hours=20.0), SLOW),  # the cheapest that is in time, just so
        (Goal(deadline_hours=19.9), MIDDLE),
        (Goal(deadline_hours=8.0), FAST),
        (Goal(deadline_hours=7.0), None),  # nothing is so fast
        (Goal(budget_dollars=1000.0), FAST),  # the fastest for the money
        (Goal(budget_dollars=150.0), MIDDLE),
        (Goal(budget_dollars=99.0), None),
        (Goal(deadline_hours=12.0, budget_dollars=130.0), MIDDLE),
        (Goal(deadline_hours=10.0, budget_dollars=150.0), None),  # each alone is possible, both aren't
    ],
)
def test_ten_questions_with_known_answers(goal: Goal, answer: Option | None) -> None:
    advice = recommend(CHOICE, goal)
    assert (advice.chosen.option if advice.chosen else None) == answer
    assert advice.reason.endswith(".")


def test_the_least_miss_is_named_when_nothing_fits() -> None:
    advice = recommend(CHOICE, Goal(deadline_hours=7.0))
    assert advice.others[0].option == FAST
    assert str(FAST) in advice.reason and "8.0 h" in advice.reason


def test_of_equal_options_the_one_with_fewer_machines_is_taken() -> None:
    advice = recommend([promised(FAST, 8.0, 100.0), promised(SLOW, 8.0, 100.0)], Goal(deadline_hours=9.0))
    assert advice.chosen is not None and advice.chosen.option == SLOW


def test_what_such_runs_do_not_tell_apart_is_named() -> None:
    """Of equal ones lazy comes before eager, which needs more memory; what is within a hundredth is said."""
    eager, dearer = Option("eager", 1, 4, 4), Option("off", 1, 4, 4)
    found = recommend([promised(eager, 8.0, 100.0), promised(SLOW, 8.0, 100.0), promised(dearer, 8.0, 100.9)], Goal())
    assert found.chosen is not None and found.chosen.option == SLOW
    assert found.reason.endswith(f"Within 1%, which such runs don't tell apart, are: {eager}; {dearer}.")
    apart = recommend([promised(SLOW, 8.0, 100.0), promised(eager, 8.0, 101.1)], Goal())
    assert "Within" not in apart.reason
    by_hours = recommend([promised(SLOW, 8.0, 100.0), promised(FAST, 8.1, 99.0)], Goal(budget_dollars=200.0))
    assert "Within" not in by_hours.reason


def test_confidence_counts_runs() -> None:
    runs = [(float(hour), 10.0 * hour, True) for hour in range(1, 11)]
    assert outcome_of(SLOW, runs, confidence=0.9).hours == 9.0
    assert outcome_of(SLOW, runs, confidence=0.91).hours == 10.0
    assert outcome_of(SLOW, runs, confidence=1.0).dollars == 100.0


def test_a_run_that_never_finishes_is_never_in_time() -> None:
    runs = [(1.0, 1.0, True)] * 8 + [(2400.0, 9.0, False)] * 2
    sure, unsure = outcome_of(SLOW, runs, confidence=0.8), outcome_of(SLOW, runs, confidence=0.9)
    assert (sure.hours, sure.finished) == (1.0, 0.8)
    assert unsure.hours == math.inf
    assert recommend([unsure], Goal()).chosen is None
    assert "finishes" in recommend([unsure], Goal()).reason


def test_the_asked_share_of_runs_keeps_deadline_and_budget() -> None:
    """Nine of ten are in time and nine of ten are cheap enough, but eight are both."""
    runs = [(100.0, 1.0, True), (1.0, 100.0, True), *[(1.0, 1.0, True)] * 8]
    for confidence, chosen in ((0.9, None), (0.8, SLOW)):
        outcome = outcome_of(SLOW, runs, confidence=confidence)
        assert (outcome.hours, outcome.dollars) == (1.0, 1.0)
        for both in (Goal(2.0, 2.0, confidence), Goal(2.0, 2.0, 0.8)):
            found = recommend([outcome], both).chosen
            assert (found.option if found else None) == (SLOW if both.confidence == 0.8 else chosen)
        assert recommend([outcome], Goal(2.0, None, confidence)).chosen == outcome
        text = recommend([outcome], Goal(None, None, confidence)).reason
        assert f"{confidence:.0%} of the runs took at most 1.0 h, and {confidence:.0%} cost at most $1." in text


@pytest.mark.parametrize(
    ("count", "confidence", "words"),
    [
        (20, 0.9, "90% of the runs"),
        (20, 0.99, "all 20 runs"),
        (200, 0.995, "99.5% of the runs"),
        (9, 0.9, "all 9 runs"),
        (10, 0.9, "90% of the runs"),
        (1, 0.1, "the one run"),
        (5, 1.0, "all 5 runs"),
    ],
)
def test_no_share_is_promised_that_so_few_runs_can_not_tell(count: int, confidence: float, words: str) -> None:
    outcome = outcome_of(SLOW, [(1.0, 2.0, True)] * count, confidence=confidence)
    for goal in (Goal(confidence=confidence), Goal(2.0, 3.0, confidence), Goal(0.5, None, confidence)):
        text = recommend([outcome], goal).reason
        assert f"in {words}" in text
        again = f"{100 * confidence:g}% " if words.endswith("the runs") else ""
        assert f"{words} took at most 1.0 h, and {again}cost at most $2" in text


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.floats(1, 100), st.floats(1, 100)), min_size=1, max_size=8),
    st.none() | st.floats(1, 100),
    st.none() | st.floats(1, 100),
)
def test_the_choice_is_the_best_of_those_that_keep_the_goal(
    found: list[tuple[float, float]], deadline: float | None, budget: float | None
) -> None:
    outcomes = [promised(Option("lazy", 1, 4, 4 + i), hours, dollars) for i, (hours, dollars) in enumerate(found)]
    kept = [one for one in outcomes if one.hours <= (deadline or math.inf) and one.dollars <= (budget or math.inf)]
    chosen = recommend(outcomes, Goal(deadline, budget)).chosen
    assert (chosen is None) == (not kept)
    if chosen is not None:
        assert chosen in kept
        by_time = budget is not None and deadline is None
        assert (chosen.hours if by_time else chosen.dollars) == min(
            one.hours if by_time else one.dollars for one in kept
        )


@pytest.mark.parametrize("goal", [{"confidence": 0.0}, {"deadline_hours": -1.0}, {"budget_dollars": math.inf}])
def test_goals_that_make_no_sense_are_errors(goal: dict[str, float]) -> None:
    with pytest.raises(ScenarioError):
        Goal(**goal)


def test_machines_that_nobody_takes_need_no_redundancy(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["advise", "--preset", "bert", "--removal-probability", "0", "--seeds", "1", "--json", "-"]
    assert main([*command, "--grids", "2x12", "--machines", "24"]) == 0
    advice = json.loads(capsys.readouterr().out)
    assert advice["chosen"]["option"]["mode"] == "off"
    assert {one["option"]["mode"] for one in advice["options"]} == {"lazy", "eager", "off", "on-demand"}


def test_the_text_says_what_it_assumes(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["advise", "--preset", "bert", "--removal-probability", "0.1", "--seeds", "1", "--modes", "lazy"]
    assert main([*command, "--grids", "2x12", "--machines", "24", "--deadline-hours", "0.1"]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert (
        "Nothing fits." in shown
        and "Assumed: 22194 steps; $0.91 a machine-hour; each machine is taken with odds of 0.1" in shown
    )


def advice(options: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """What the command answers, as JSON."""
    assert main(["advise", "--seeds", "1", "--json", "-", *options]) in (0, 1)
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("name", preset_names())
def test_on_demand_has_the_grid_that_its_step_time_is_of(name: str) -> None:
    """As the preset's source says: 4 pipelines of as many stages as all its machines allow."""
    on_demand = load_preset(name).policies.on_demand
    assert on_demand is not None and on_demand.grid is not None
    assert on_demand.grid[0] == 4 and 4 * on_demand.grid[1] == on_demand.machines
    assert f"4 x {on_demand.grid[1]} machines" in load_preset(name).model.source


def test_on_demand_names_its_own_grid_or_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--modes", "on-demand", "--steps", "100"]
    option = advice(["--preset", "bert", *asked], capsys)["chosen"]["option"]
    assert (option["pipelines"], option["stages"], option["machines"]) == (4, 8, 32)
    unknown = {"preset": "bert", "policies": {"on_demand": {"grid": None}}}
    path = tmp_path / "s.json"
    path.write_text(json.dumps(unknown))
    found = advice(["--scenario", str(path), *asked], capsys)
    assert (found["chosen"]["option"]["pipelines"], found["chosen"]["option"]["stages"]) == (None, None)
    assert main(["advise", "--seeds", "1", "--scenario", str(path), *asked]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "Run 32 machines (on-demand), the grid of the scenario's step time." in shown
    path.write_text(json.dumps({"preset": "bert", "policies": {"on_demand": {"grid": [5, 8]}}}))
    assert main(["advise", "--scenario", str(path)]) == 2
    assert "the grid [5, 8] is larger than machines, 32" in capsys.readouterr().err


def test_a_scenario_with_a_duration_is_advised_to_completion(capsys: pytest.CaptureFixture[str]) -> None:
    path = REPOSITORY / "configs" / "sim" / "zones-and-notices.json"
    options = ["--scenario", str(path), "--grids", "2x12", "--machines", "24", "--modes", "lazy", "--steps", "1000"]
    found = advice(options, capsys)
    assert found["chosen"] is not None and found["chosen"]["finished"] == 1.0
    assert found["not_looked_at"] == ["run.duration_hours 24, since it is asked when the training is complete"]
    assert found["assumptions"].startswith("Assumed: 1000 steps; example-prices.csv")


def test_what_is_asked_for_and_not_looked_at_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "s.json"
    without = load_preset("bert").model_dump(exclude_none=True)
    del without["policies"]["on_demand"]
    path.write_text(json.dumps(without))
    options = ["--scenario", str(path), "--grids", "5x12,1x12", "--machines", "12", "--steps", "10"]
    found = advice(options, capsys)
    assert {one["option"]["mode"] for one in found["options"]} == {"lazy", "eager"}
    assert found["not_looked_at"] == [
        "5 x 12, since 264 samples a step can't be shared evenly by its pipelines",
        "mode off on 1 x 12, where no other pipeline has a lost stage",
        "on-demand, since it needs policies.on_demand",
    ]
    assert main(["advise", "--seeds", "1", *options]) == 0
    assert "Not looked at: 5 x 12, since" in " ".join(capsys.readouterr().out.split())
    assert main(["advise", *options, "--modes", "on-demand"]) == 2
    assert "no option to choose from (not looked at: 5 x 12" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--steps", "0"], "option --steps: model.steps is 0"),
        (["--grids", "4by12"], "pipelines x stages"),
        (["--machines", "0"], "whole numbers from 1"),
        (["--machines", "1000000000"], "whole numbers from 1 to 1000000"),
        (["--grids", "100000x100000"], "at most 1000000 in all"),
        (["--modes", "lucky"], "there are lazy, eager, off, on-demand"),
        (["--confidence", "2"], "confidence 2.0"),
    ],
)
def test_user_errors_are_one_line(options: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", "--preset", "bert", *options]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


def test_a_model_without_an_end_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["advise", "--preset", "vgg19"]) == 2
    assert "no number of steps" in capsys.readouterr().err
