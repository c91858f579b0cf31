"""`ds_bamboo advise`: how many machines, which grid and mode, for a given aim.

ds_bamboo advise --preset bert --removal-probability 0.1 --deadline-hours 12
ds_bamboo advise --preset bert --budget-dollars 400 --confidence 0.95
ds_bamboo advise --scenario mine.json --grids 4x12,2x12 --modes lazy,off
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from ..options import file_path, filled, number
from .advise import Advice, Goal, Option, Outcome, in_words, outcome_of, recommend
from .cli import check_counts, progress_bar, scenario_of, write_text
from .console import print_whole, table_console
from .errors import ScenarioError, SimulationError
from .jobs import build_job
from .measured import said_of_measurements
from .own import how_timed, said_of_costs, said_of_its_profile, said_of_state
from .results import Summary
from .runner import run_seeds
from .scenario import Scenario, preset_names
from .steptimes import Grid

__all__ = ["add_parser"]

_FAILURE = 2
_MOST = 1_000_000
_MODES = {"lazy": "deepspeed-bamboo", "eager": "deepspeed-bamboo-eager", "off": "deepspeed-bamboo-off"}
_ON_DEMAND = "on-demand"
# Of a grid's coordinates: half as many machines, one each, and over-provisioned as in Bamboo's evaluation.
_PROVISIONING = (0.5, 1.0, 1.5)


def add_parser(subparsers: Any) -> None:
    """Register `advise` with the subparsers of ds_bamboo."""
    parser = subparsers.add_parser(
        "advise",
        help="machines, grid and mode for a deadline or a budget",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--preset", metavar="NAME", type=filled, help=f"a preset: {', '.join(preset_names())}")
    parser.add_argument("--scenario", metavar="FILE", type=file_path, help="a scenario of your own (JSON)")
    parser.add_argument("--profile", metavar="FILE", type=file_path, help="your own model, from `ds_bamboo profile`")
    parser.add_argument("--steps", metavar="N", type=int, help="steps of the whole training, in place of the preset's")
    parser.add_argument(
        "--parameters", metavar="N", type=int, help="of the model, in place of the preset's: moves, memory"
    )
    parser.add_argument("--removal-probability", metavar="P", type=number, help="of each machine, per hour, 0 to 1")
    goal = parser.add_argument_group("goal; without one: the cheapest")
    goal.add_argument("--deadline-hours", metavar="H", type=number, help="done by then, as cheaply as possible")
    goal.add_argument("--budget-dollars", metavar="D", type=number, help="for no more, as fast as possible")
    goal.add_argument("--confidence", metavar="Q", type=number, default=0.9, help="share of runs (default 0.9)")
    search = parser.add_argument_group("what to choose from")
    search.add_argument(
        "--grids", metavar="DxP,DxP", type=filled, help="default: the scenario's own and those of its step table"
    )
    search.add_argument(
        "--machines", metavar="N,N", type=filled, help="default: half, one and 1.5 times a grid's coordinates"
    )
    search.add_argument(
        "--modes", metavar="M,M", type=filled, default="lazy,eager,off,on-demand", help="default: %(default)s"
    )
    search.add_argument("--seeds", metavar="N", type=int, default=20, help="runs an option (default %(default)s)")
    parser.add_argument("--jobs", metavar="N", type=int, default=1, help="processes; results are the same (default 1)")
    parser.add_argument(
        "--json", metavar="FILE", type=filled, help="write advice and options as JSON; - is standard output"
    )
    # Read by what is shared with `simulate`.
    unused = ("rivals", "bulk_minutes", "capacity", "duration_hours", "window", "value")
    parser.set_defaults(run=run, **dict.fromkeys(unused))


def run(arguments: argparse.Namespace) -> int:
    """Do what the arguments say; user errors go to standard error in one line. Returns the exit status."""
    try:
        return _run(arguments)
    except SimulationError as error:
        print(f"ds_bamboo advise: {error}", file=sys.stderr)
        return _FAILURE


def _run(arguments: argparse.Namespace) -> int:
    goal = Goal(arguments.deadline_hours, arguments.budget_dollars, arguments.confidence)
    check_counts(arguments)
    scenario, folder = scenario_of(arguments)
    if scenario.model.steps is None:
        raise ScenarioError(
            f"{scenario.model.name} has no number of steps, so no run is ever done; give --steps N, or set model.steps"
        )
    scenario, left_out = _to_completion(scenario)
    options = _options(scenario, arguments, left_out)
    runs = len(options) * arguments.seeds
    print(f"{len(options)} options, {runs} runs to simulate; this takes minutes on a few cores", file=sys.stderr)
    with progress_bar(len(options)) as report:
        outcomes = []
        for each in options:
            outcomes.append(_simulated(each, scenario, folder, arguments))
            report(len(outcomes))
    advice = recommend(outcomes, goal)
    if arguments.json:
        said = {"assumptions": _assumptions(scenario, folder, arguments), "not_looked_at": left_out}
        write_text(arguments.json, _as_json(advice, outcomes, said, arguments))
    if arguments.json != "-":
        lines = [*(f"Not looked at: {one}." for one in left_out), _assumptions(scenario, folder, arguments)]
        _print(advice, outcomes, lines, arguments)
    return 0 if advice.chosen else 1


def _to_completion(scenario: Scenario) -> tuple[Scenario, list[str]]:
    """The scenario without an end of its runs before their last step, and what there is to say of that."""
    hours = scenario.run.duration_hours
    if hours is None:
        return scenario, []
    run = scenario.run.model_copy(update={"duration_hours": None})
    said = f"run.duration_hours {hours:g}, since it is asked when the training is complete"
    return scenario.model_copy(update={"run": run}), [said]


def _options(scenario: Scenario, arguments: argparse.Namespace, left_out: list[str]) -> list[Option]:
    """What there is to choose from. What was asked for beside it is added to ``left_out``, with the reason."""
    live, on_demand = scenario.policies.live, scenario.policies.on_demand
    if live is None:
        raise ScenarioError("the scenario has no parameters for this project's policy; add policies.live")
    modes = [part.strip() for part in arguments.modes.split(",")]
    unknown = [mode for mode in modes if mode not in (*_MODES, _ON_DEMAND)]
    if unknown:
        raise ScenarioError(f"--modes {unknown[0]!r} is unknown: there are {', '.join((*_MODES, _ON_DEMAND))}")
    found = []
    for grid in _dividing(scenario, Grid(live.pipelines, live.stages), arguments.grids, left_out):
        default = [max(1, math.ceil(grid.size * share)) for share in _PROVISIONING]
        if "off" in modes and grid.pipelines == 1:
            left_out.append(f"mode off on 1 x {grid.stages}, where no other pipeline has a lost stage")
        for machines in _counts(arguments.machines) if arguments.machines else default:
            for mode in modes:
                if mode in _MODES and not (mode == "off" and grid.pipelines == 1):
                    found.append(Option(mode, grid.pipelines, grid.stages, machines))
    if _ON_DEMAND in modes and on_demand is not None:
        pipelines, stages = on_demand.grid or (None, None)
        found.append(Option(_ON_DEMAND, pipelines, stages, on_demand.machines))
    elif _ON_DEMAND in modes:
        why = "the preset's step time is of another model" if arguments.profile else "it needs policies.on_demand"
        left_out.append(f"{_ON_DEMAND}, since {why}")
    if not found:
        raise ScenarioError(
            f"there is no option to choose from (not looked at: {'; '.join(left_out)}); give other ones"
        )
    return found


def _dividing(scenario: Scenario, own: Grid, asked: str | None, left_out: list[str]) -> list[Grid]:
    """The grids among which pipelines share the samples of a step evenly."""
    samples = scenario.model.samples_per_step
    table = [Grid(row.pipelines, row.stages) for row in scenario.model.table]
    grids = list(dict.fromkeys(_grids(asked) if asked else [own, *table]))
    kept = [grid for grid in grids if not samples % grid.pipelines]
    if not kept:
        raise ScenarioError(
            f"--grids {asked or f'{own.pipelines}x{own.stages}'}: {samples} samples a step can't be shared evenly by "
            "any of them, so none would start; give others"
        )
    left_out += [
        f"{grid.pipelines} x {grid.stages}, since {samples} samples a step can't be shared evenly by its pipelines"
        for grid in grids
        if grid not in kept
    ]
    return kept


def _grids(text: str) -> list[Grid]:
    try:
        found = [Grid(*(int(part) for part in one.split("x"))) for one in text.split(",")]
    except (TypeError, ValueError):
        found = []
    if not found or any(min(grid) < 1 or grid.size > _MOST for grid in found):
        raise ScenarioError(
            f"--grids {text}: they are pipelines x stages, at most {_MOST} in all, for example 4x12,2x12"
        )
    return found


def _counts(text: str) -> list[int]:
    try:
        found = [int(one) for one in text.split(",")]
    except ValueError:
        found = [0]
    if min(found) < 1 or max(found) > _MOST:
        raise ScenarioError(f"--machines {text}: they are whole numbers from 1 to {_MOST}, for example 24,48")
    return found


def _simulated(option: Option, scenario: Scenario, folder: Path | None, arguments: argparse.Namespace) -> Outcome:
    seeds = range(1, arguments.seeds + 1)
    policy = _MODES.get(option.mode, option.mode)
    job = build_job(_with_option(scenario, option), folder=folder)
    [summary] = run_seeds(job, policies=[policy], seeds=seeds, processes=arguments.jobs)
    return outcome_of(option, _runs_of(summary), confidence=arguments.confidence)


def _with_option(scenario: Scenario, option: Option) -> Scenario:
    if option.mode == _ON_DEMAND or scenario.policies.live is None:
        return scenario
    live = scenario.policies.live.model_copy(update={"pipelines": option.pipelines, "stages": option.stages})
    policies = scenario.policies.model_copy(update={"live": live.model_copy(update={"redundancy": "lazy"})})
    market = scenario.market.model_copy(update={"capacity": option.machines})
    return scenario.model_copy(update={"market": market, "policies": policies})


def _runs_of(summary: Summary) -> list[tuple[float, float, bool]]:
    return [(run.duration_hours, run.cost_dollars, bool(run.completed)) for run in summary.runs]


def _assumptions(scenario: Scenario, folder: Path | None, arguments: argparse.Namespace) -> str:
    market, odds = scenario.market, scenario.market.removal_probability
    removal = f"{odds:g} an hour" if isinstance(odds, float) else "by the hour of the day"
    price = market.price_history or f"${market.dollars_per_hour:g} a machine-hour"
    together = (
        f"and a whole zone with {market.zone_removal_probability:g}"
        if market.zone_removal_probability
        else "on its own (no losses of a whole zone)"
    )
    if market.bulk_minutes is not None:
        together += f", two to all but one at once in each {market.bulk_minutes:g} minutes"
    job = build_job(scenario, folder=folder)
    given = {name: getattr(arguments, name) is not None for name in ("steps", "parameters")}
    of_profile = said_of_measurements(scenario, given=given, others="off" in arguments.modes.split(","))
    of_profile += said_of_its_profile(job)
    return (
        f"Assumed: {scenario.model.steps} steps; {price}; each machine is taken with odds of {removal}, {together}, "
        f"and missing ones come back by the market's odds; {how_timed(job)}; losses and joins cost what policies.live "
        f"says; {'; '.join([said_of_costs(scenario), said_of_state(scenario.model), *of_profile])}. "
        "See docs/simulator.md."
    )


def _print(advice: Advice, outcomes: list[Outcome], lines: list[str], arguments: argparse.Namespace) -> None:
    console = table_console()
    shown = [] if advice.chosen is None else [advice.chosen]
    console.print(f"Run {advice.chosen.option}." if advice.chosen else "Nothing fits.", highlight=False)
    console.print(advice.reason, highlight=False)
    share = in_words(arguments.confidence, count=len(outcomes[0].runs))
    print_whole(_table([*shown, *advice.others], share), console)
    for line in lines:
        console.print(line, highlight=False)


def _table(outcomes: list[Outcome], share: str) -> Table:
    table = Table(title=f"what {share} stayed within", title_justify="left")
    for heading in ("mode", "grid", "machines", "hours", "dollars", "finished"):
        table.add_column(heading, justify="left" if heading == "mode" else "right", no_wrap=True)
    for one in outcomes:
        option = one.option
        hours, dollars = (f"{one.hours:.1f}", f"{one.dollars:.0f}") if math.isfinite(one.hours) else ("never", "-")
        table.add_row(option.mode, option.grid, str(option.machines), hours, dollars, f"{one.finished:.0%}")
    return table


def _as_json(advice: Advice, outcomes: list[Outcome], said: dict[str, Any], arguments: argparse.Namespace) -> str:
    return json.dumps(
        {
            "chosen": _plain(advice.chosen) if advice.chosen else None,
            "reason": advice.reason,
            **said,
            "confidence": arguments.confidence,
            "seeds": arguments.seeds,
            "options": [_plain(one) for one in outcomes],
        },
        indent=1,
    )


def _plain(outcome: Outcome) -> dict[str, Any]:
    """For JSON, which has no infinity: None in its place."""
    plain = asdict(outcome)
    del plain["runs"]
    for name in ("hours", "dollars", "mean_dollars"):
        plain[name] = plain[name] if math.isfinite(plain[name]) else None
    return plain
