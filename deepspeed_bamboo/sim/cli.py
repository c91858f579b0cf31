"""`ds_bamboo simulate`: what training on spot machines will cost, by policy.

ds_bamboo simulate --preset bert --removal-probability 0.1 --seeds 20
ds_bamboo simulate --preset bert --trace trace.csv --plot policies.png
ds_bamboo simulate --predictors --trace trace.csv
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress as Bar
from rich.table import Table

from ..options import file_path, filled, number
from .build import OWN_POLICIES, available_policies
from .bulk_report import compared_with_undisturbed, said_of_bulk_losses
from .clock import hours
from .console import print_whole, table_console
from .errors import ScenarioError, SimulationError
from .jobs import Job, build_job
from .machines import Change, MachineEvent
from .measured import said_of_measurements, with_measurements
from .own import how_timed, said_of_costs, said_of_its_profile
from .predict import (
    counts_by_interval,
    fitting_history,
    mean_absolute_error,
    named_predictors,
    require_statsmodels,
)
from .report import as_json, never_trained, print_table
from .results import Summary
from .rivals import RIVAL_COSTS, with_rival_costs
from .runner import run_seeds
from .scenario import Scenario, load_preset, load_scenario, preset_names, validated
from .traces import Trace, read_trace, segment

__all__ = ["add_parser", "check_counts", "main", "progress_bar", "scenario_of", "write_text"]

_FAILURE = 2
_HORIZONS = "5,8,12"
_MOST_RUNS = 100_000


def main(arguments: Sequence[str]) -> int:
    """Run as a program of its own; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m deepspeed_bamboo.sim", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    _add_arguments(parser)
    return run(parser.parse_args(arguments))


def add_parser(subparsers: Any) -> None:
    """Register `simulate` with the subparsers of ds_bamboo; `run` is called with the parsed arguments."""
    parser = subparsers.add_parser(
        "simulate",
        help="simulate policies on spot machines: throughput, cost, value",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_arguments(parser)
    parser.set_defaults(run=run)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("what to simulate")
    what.add_argument("--preset", metavar="NAME", type=filled, help=f"a preset: {', '.join(preset_names())}")
    what.add_argument(
        "--scenario", metavar="FILE", type=file_path, help="a scenario of your own (JSON); see configs/sim"
    )
    what.add_argument(
        "--profile", metavar="FILE", type=file_path, help="your own model and costs, from `ds_bamboo profile`"
    )
    what.add_argument("--rivals", choices=RIVAL_COSTS, help="more rivals, and what all are charged (sim/rivals.py)")
    what.add_argument(
        "--policy", metavar="NAME", type=filled, action="append", help="repeatable; default: the preset's, or all"
    )
    what.add_argument("--seeds", metavar="N", type=int, default=1, help="runs with the seeds 1 to N (default 1)")
    what.add_argument("--steps", metavar="N", type=int, help="steps to completion, in place of the preset's")
    what.add_argument(
        "--parameters", metavar="N", type=int, help="of the model, in place of the preset's: moves, memory"
    )
    what.add_argument("--duration-hours", metavar="H", type=number, help="default: to completion, or the trace's end")
    what.add_argument("--window", choices=("wall", "training"), help="all of the run, or first to last step (see docs)")
    what.add_argument("--value", choices=("ratio_of_means", "mean_of_ratios"), help="which of them `value` is")
    machines = parser.add_argument_group("machines")
    machines.add_argument("--removal-probability", metavar="P", type=number, help="of each machine, per hour, 0 to 1")
    machines.add_argument(
        "--bulk-minutes", metavar="M", type=number, help="in each M minutes 2 to all but one machine go at once"
    )
    machines.add_argument("--capacity", metavar="N", type=int, help="machines wanted")
    machines.add_argument("--trace", metavar="FILE", type=file_path, help="machines as recorded, instead of by odds")
    machines.add_argument("--segment", metavar="FROM-TO", type=filled, help="hours of the trace, for example 1.5-2.5")
    predictors = parser.add_argument_group("predictors of availability, instead of policies")
    predictors.add_argument("--predictors", action="store_true", help="their mean absolute errors on --trace")
    predictors.add_argument("--horizons", metavar="N,N", type=filled, help=f"minutes ahead (default {_HORIZONS})")
    out = parser.add_argument_group("results")
    out.add_argument(
        "--json", metavar="FILE", type=filled, help="write the results as JSON; - is standard output, without a table"
    )
    out.add_argument("--plot", metavar="FILE", type=file_path, help="draw the policies over time (extra: plot)")
    out.add_argument("--jobs", metavar="N", type=int, default=1, help="processes; the results are the same (default 1)")
    out.add_argument("--list", action="store_true", help="list presets and their policies, and end")


def run(arguments: argparse.Namespace) -> int:
    """Do what the arguments say; user errors go to standard error in one line. Returns the exit status."""
    try:
        return _run(arguments)
    except SimulationError as error:
        print(f"ds_bamboo simulate: {error}", file=sys.stderr)
        return _FAILURE


def _run(arguments: argparse.Namespace) -> int:
    console = table_console()
    if arguments.list:
        for name in preset_names():
            preset = load_preset(name)
            text = f"{name}: {preset.description} Policies: {', '.join(available_policies(preset))}."
            columns = shutil.get_terminal_size().columns
            print(textwrap.fill(text, columns, subsequent_indent="  ", break_on_hyphens=False))
        return 0
    _check_predictors(arguments)
    if arguments.predictors:
        return _compare_predictors(arguments, console)
    if arguments.plot:
        from .plot import plot_policies, require_matplotlib

        require_matplotlib()
    scenario, folder = scenario_of(arguments)
    trace = _trace(arguments)
    check_counts(arguments)
    _check_trace_options(arguments, scenario)
    job = build_job(scenario, trace=trace, folder=folder)
    policies = arguments.policy or ([scenario.policy] if scenario.policy else available_policies(scenario))
    seeds = range(1, arguments.seeds + 1)
    with progress_bar(len(policies) * len(seeds)) as report:
        summaries = run_seeds(job, policies=policies, seeds=seeds, processes=arguments.jobs, report=report)
    bulk = list(compared_with_undisturbed(job, summaries, seeds=seeds))
    repairs = list(trace.repairs) if trace else []
    notes = [] if trace is None else [*_unused(trace, capacity=scenario.market.capacity), *_after_the_trace(job, trace)]
    notes += _after_the_prices(job, summaries)
    about: dict[str, Any] = {
        "preset": arguments.preset,
        "scenario": str(arguments.scenario) if arguments.scenario else None,
        "trace": str(arguments.trace) if arguments.trace else None,
        "segment": arguments.segment,
        "seeds": arguments.seeds,
        "repairs": repairs,
        "notes": [*never_trained(summaries), *notes],
        "assumed": _assumed(job, policies, arguments),
        "bulk_losses": [asdict(found) for found in bulk],
    }
    if arguments.json:
        write_text(arguments.json, as_json(summaries, about=about))
    if arguments.json != "-":
        print_table(summaries, title=_title(job, arguments), console=console)
        lines = [*map(said_of_bulk_losses, bulk), *(f"repaired: {repair}" for repair in repairs)]
        for line in (*lines, *notes, *(f"assumed: {line}" for line in about["assumed"])):
            console.print(line, highlight=False)
    if arguments.plot:
        plot_policies(job, policies=policies, seed=1, path=arguments.plot)
    return 0


def _unused(trace: Trace, *, capacity: int) -> Iterator[str]:
    """A line where the trace has more machines than are used."""
    live: set[str] = set()
    most = 0
    for _, events in groupby(sorted(trace.events, key=_moment), lambda event: event.at_milliseconds):
        for event in events:
            if event.change is Change.ADD:
                live.add(event.node)
            elif event.change is Change.REMOVE:
                live.discard(event.node)
        most = max(most, len(live))
    if most > capacity:
        yield (
            f"the trace has up to {most} machines at a time, and the capacity is {capacity}: up to "
            f"{most - capacity} are not used (--capacity {most} uses all)"
        )


def _after_the_trace(job: Job, trace: Trace) -> Iterator[str]:
    """A line where a run lasts for longer than the trace, which says nothing of that time."""
    if job.end_milliseconds > trace.duration_milliseconds:
        yield (
            f"the trace ends after {hours(trace.duration_milliseconds):.2f} h, and the run after "
            f"{hours(job.end_milliseconds):.2f} h: the machines that are there at the trace's end stay to the run's, "
            "which flatters all policies (--duration-hours)"
        )


def _after_the_prices(job: Job, summaries: Sequence[Summary]) -> Iterator[str]:
    """A line where the last price of a history stays for some of a run."""
    last = job.prices.changes[-1]
    longest = max(run.duration_hours for summary in summaries for run in summary.runs)
    if job.scenario.market.price_history and hours(last) < longest:
        yield (
            f"the last price in {job.scenario.market.price_history} begins at hour {hours(last):.2f} of the run, and "
            f"stays to its end, hour {longest:.2f}"
        )


def _moment(event: MachineEvent) -> tuple[int, int]:
    return event.at_milliseconds, event.change


def _assumed(job: Job, policies: Sequence[str], arguments: argparse.Namespace) -> list[str]:
    """What the figures rest on: those of this project's policy, where it is among those simulated, and by --profile."""
    to_completion = job.trace is None and job.scenario.run.duration_hours is None
    others = any(policy not in OWN_POLICIES or policy.endswith("-off") for policy in policies)
    given = {"steps": arguments.steps is not None or not to_completion, "parameters": arguments.parameters is not None}
    found = said_of_measurements(job.scenario, given=given, others=others)
    if any(policy in OWN_POLICIES for policy in policies):
        costs = said_of_costs(job.scenario)
        found.insert(0, f"{how_timed(job)}; losses and joins cost what policies.live says; {costs}")
        found += said_of_its_profile(job)
    return [*found, *_of_notices(job, policies)]


def _of_notices(job: Job, policies: Sequence[str]) -> Iterator[str]:
    """A line where machines are warned and policies are simulated that do not listen."""
    warned = job.scenario.market.notice_seconds > 0
    if job.trace is not None:
        warned = any(event.change is Change.NOTICE for event in job.trace.events)
    deaf = [policy for policy in policies if policy not in (*OWN_POLICIES, "on-demand", "oracle")]
    if warned and deaf:
        yield (
            f"notices are used by this project's policies alone: {', '.join(deaf)} lose a warned machine like any "
            "other, though with minutes to save or to move they would lose less"
        )


def _compare_predictors(arguments: argparse.Namespace, console: Console) -> int:
    trace = _trace(arguments)
    if trace is None:
        raise ScenarioError("--predictors are measured on a trace: give --trace as well")
    try:
        horizons = [int(part) for part in (arguments.horizons or _HORIZONS).split(",")]
    except ValueError:
        horizons = [0]
    if min(horizons) < 1:
        raise ScenarioError(f"--horizons {arguments.horizons}: they are whole numbers from 1, for example 5,8,12")
    require_statsmodels()
    counts = counts_by_interval(trace, interval_seconds=60.0)
    errors = {
        name: {
            horizon: mean_absolute_error(counts, predictor, horizon=horizon, history=fitting_history(horizon))
            for horizon in horizons
        }
        for name, predictor in named_predictors(("persistence", "moving-average", "arima")).items()
    }
    if arguments.json:
        write_text(arguments.json, json.dumps({"mean_absolute_error_by_horizon_minutes": errors}, indent=1))
    if arguments.json != "-":
        table = Table(title=f"mean absolute error in machines, {arguments.trace}", title_justify="left")
        table.add_column("predictor")
        for horizon in horizons:
            table.add_column(f"{horizon} min", justify="right")
        for name, by_horizon in errors.items():
            table.add_row(name, *(f"{error:.2f}" for error in by_horizon.values()))
        print_whole(table, console)
    return 0


def _check_predictors(arguments: argparse.Namespace) -> None:
    """Predictors look at a trace alone, and only they have horizons."""
    if not arguments.predictors:
        if arguments.horizons is not None:
            raise ScenarioError(
                f"--horizons {arguments.horizons} are of --predictors; give that as well, or leave it out"
            )
        return
    others = ("preset", "scenario", "profile", "rivals", "policy", "steps", "duration_hours", "window", "value", "plot")
    market = ("parameters", "removal_probability", "bulk_minutes", "capacity")
    given = [name for name in (*others, *market) if getattr(arguments, name) is not None]
    if given or arguments.seeds != 1:
        option = f"--{given[0].replace('_', '-')}" if given else f"--seeds {arguments.seeds}"
        raise ScenarioError(f"--predictors and {option}: predictors look at the trace alone; leave one of them out")


def check_counts(arguments: argparse.Namespace) -> None:
    """Raises ScenarioError where runs or processes are none, or so many that only a slip of the pen asks for them."""
    for option, value in (("--seeds", arguments.seeds), ("--jobs", arguments.jobs)):
        if not 1 <= value <= _MOST_RUNS:
            raise ScenarioError(f"{option} {value}: at least 1 is needed, and at most {_MOST_RUNS}; correct it")


def _check_trace_options(arguments: argparse.Namespace, scenario: Scenario) -> None:
    """A recorded trace leaves nothing to odds, and happens one way, but for losses of many at once that come on top."""
    if arguments.trace is None:
        return
    if arguments.removal_probability is not None:
        raise ScenarioError(
            f"--removal-probability {arguments.removal_probability} and --trace {arguments.trace}: a trace says which "
            "machines go; give one of them"
        )
    if arguments.seeds > 1 and scenario.market.bulk_minutes is None:
        raise ScenarioError(
            f"--seeds {arguments.seeds} and --trace {arguments.trace}: a trace happens one way, so further runs "
            "would repeat the first; leave --seeds out"
        )


def _title(job: Job, arguments: argparse.Namespace) -> str:
    machines = f"{arguments.trace}" if arguments.trace else f"capacity {job.scenario.market.capacity}"
    part = f", hours {arguments.segment}" if arguments.segment else ""
    return f"{job.scenario.model.name}, {machines}{part}, seeds {arguments.seeds}"


def scenario_of(arguments: argparse.Namespace) -> tuple[Scenario, Path | None]:
    """The scenario with the options on top of it, and the folder of its relative paths."""
    if bool(arguments.preset) == bool(arguments.scenario):
        raise ScenarioError(f"give --preset NAME or --scenario FILE, one of them; presets: {', '.join(preset_names())}")
    scenario = load_preset(arguments.preset) if arguments.preset else load_scenario(arguments.scenario)
    if arguments.profile:
        scenario = with_measurements(scenario, arguments.profile)
    if arguments.rivals:
        scenario = with_rival_costs(scenario, arguments.rivals)
    data = scenario.model_dump(exclude_none=True)
    options = (
        ("--steps", arguments.steps, ("model", "steps")),
        ("--parameters", arguments.parameters, ("model", "parameters")),
        ("--removal-probability", arguments.removal_probability, ("market", "removal_probability")),
        ("--bulk-minutes", arguments.bulk_minutes, ("market", "bulk_minutes")),
        ("--capacity", arguments.capacity, ("market", "capacity")),
        ("--duration-hours", arguments.duration_hours, ("run", "duration_hours")),
        ("--window", arguments.window, ("run", "window")),
        ("--value", arguments.value, ("run", "value")),
    )
    for option, value, (section, key) in options:
        if value is not None:
            data[section][key] = value
            validated(data, where=f"option {option}")
    return validated(data, where="options"), arguments.scenario.parent if arguments.scenario else None


def _trace(arguments: argparse.Namespace) -> Trace | None:
    if arguments.trace is None:
        if arguments.segment:
            raise ScenarioError(f"--segment {arguments.segment} is of a trace: give --trace as well")
        return None
    trace = read_trace(arguments.trace, generator=random.Random(0))
    if not arguments.segment:
        return trace
    try:
        start, end = (number(part) for part in arguments.segment.split("-"))
    except (ValueError, argparse.ArgumentTypeError):
        raise ScenarioError(f"--segment {arguments.segment}: it is FROM-TO in hours, for example 1.5-2.5") from None
    return segment(trace, from_hours=start, to_hours=end)


def write_text(target: str, text: str) -> None:
    """Write text with a newline to a file, or print it for `-`. Raises ScenarioError when it can't be written."""
    if target == "-":
        print(text)
        return
    try:
        Path(target).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ScenarioError(f"--json {target}: cannot be written ({error.strerror}); give another path") from error


@contextlib.contextmanager
def progress_bar(total: int) -> Iterator[Callable[[int], None]]:
    """A bar on standard error while several runs last; nothing when it isn't a terminal."""
    console = Console(stderr=True)
    with Bar(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("runs", total=total)
        yield lambda done: bar.update(task, completed=done)
