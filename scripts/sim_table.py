"""This project's policy against every rival, everywhere: one table, with what it lacks to the oracle and why.

    python scripts/sim_table.py --traces TRACES            # some minutes; TRACES is a folder of recorded traces
    python scripts/sim_table.py --seeds 5                  # odds only

BERT in the published setting (to completion, value as a mean of ratios), then BERT and GPT-2, fp32 and bf16, odds of
0.01 to 0.5 an hour and all traces of a folder, rivals with generous and
with fair costs (deepspeed_bamboo/sim/rivals.py). `own` is the best of this project's modes (redundancy.mode); in bf16
mode off survives nothing. The last columns say what lacks to the oracle, in points of all hours: in steps reducing
gradients, bubbles and uneven loads, none of which the oracle has, then replicas, work that was done again, pauses and
too few machines. The rest is machines that boot or start, and steps while shadows are copied.
After a fatal loss those who are left go on from checkpoints in memory (--fatal restart: all start again).
Traces that are not there are left out, and named. Step times are of V100s whatever machines a trace is of.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from deepspeed_bamboo.sim.build import OWN_POLICIES, available_policies
from deepspeed_bamboo.sim.console import print_whole, table_console
from deepspeed_bamboo.sim.jobs import build_job
from deepspeed_bamboo.sim.results import Summary
from deepspeed_bamboo.sim.rivals import RIVAL_COSTS, RivalCosts, with_rival_costs
from deepspeed_bamboo.sim.scenario import load_preset, validated
from deepspeed_bamboo.sim.shared_runs import SharedRuns
from deepspeed_bamboo.sim.traces import Trace, read_trace, segment

ODDS = (0.01, 0.05, 0.1, 0.25, 0.5)
# As published, it is another simulator's account of Bamboo.
LEFT_OUT = ("bamboo-published", "on-demand", "oracle", *OWN_POLICIES)
# Grids that start with the batch; the best one is taken, as a user would.
GRIDS = {"bert": ((3, 24), (6, 24), (12, 24)), "gpt2": ((2, 24), (4, 24))}
# The published setting, with its own definition of value and on demand, at the odds at which it is compared.
PUBLISHED = {"bert-published": ((6, 24), (12, 24))}
PUBLISHED_ODDS = (0.1,)
POINTS = ("reducing", "bubble", "uneven", "redundant", "wasted", "paused", "idle")
SEGMENTS = {"aws-p3-us-east.csv": ((5.5, 6.5), (1.5, 2.5), (8.0, 9.0), (10.0, 11.0))}


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, help="folder of recorded traces (*.csv, *.txt)")
    parser.add_argument("--presets", default="bert-published,bert,gpt2", help="default: %(default)s")
    parser.add_argument("--precisions", default="fp32,bf16", help="comma-separated (default fp32,bf16)")
    parser.add_argument("--fatal", choices=("restart", "in-place"), default="in-place", help="policies.live.fatal")
    parser.add_argument("--seeds", type=int, default=10, help="of the odds (default 10)")
    parser.add_argument("--hours", type=float, default=8.0, help="of runs by odds (default 8)")
    parser.add_argument("--output", type=Path, help="also write the rows as JSON")
    arguments = parser.parse_args(argv)
    console = table_console()
    traces = dict(_traces(arguments.traces))
    if not traces:
        console.print("no traces: give --traces a folder of *.csv or *.txt files; odds only")
    rows, shared = [], SharedRuns()
    for preset in arguments.presets.split(","):
        precisions = ["fp32"] if preset in PUBLISHED else arguments.precisions.split(",")
        for precision in precisions:
            for row in _rows(preset, precision, traces, shared, arguments):
                rows.append(row)
                print(json.dumps(row), file=sys.stderr, flush=True)
    print_whole(_table(rows), console)
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0


def _traces(folder: Path | None) -> Iterator[tuple[str, Trace]]:
    if folder is None or not folder.is_dir():
        return
    for path in sorted(folder.iterdir()):
        if path.suffix not in (".csv", ".txt"):
            continue
        trace = read_trace(path, generator=random.Random(0))
        yield path.stem, trace
        for begin, end in SEGMENTS.get(path.name, ()):
            yield f"{path.stem} {begin:g}-{end:g} h", segment(trace, from_hours=begin, to_hours=end)


def _rows(
    preset: str, precision: str, traces: dict[str, Trace], shared: SharedRuns, arguments: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    data = load_preset(preset).model_dump(exclude_none=True)
    data["model"]["precision"] = precision
    data["policies"]["live"]["fatal"] = arguments.fatal
    own_grid = (data["policies"]["live"]["pipelines"], data["policies"]["live"]["stages"])
    grids = {**GRIDS, **PUBLISHED}.get(preset, (own_grid,))
    where = {"model": preset, "precision": precision}
    for costs in RIVAL_COSTS:
        for name, trace in traces.items() if preset not in PUBLISHED else ():
            yield where | _row(data, costs, trace, name, grids=grids, seeds=1, shared=shared)
        for odds in PUBLISHED_ODDS if preset in PUBLISHED else ODDS:
            by_odds = data | {"market": {**data["market"], "removal_probability": odds}}
            if preset not in PUBLISHED:
                by_odds |= {"run": {"duration_hours": arguments.hours}}
            name = f"odds {odds:g}"
            yield where | _row(by_odds, costs, None, name, grids=grids, seeds=arguments.seeds, shared=shared)


def _row(
    data: dict[str, Any],
    costs: RivalCosts,
    trace: Trace | None,
    name: str,
    *,
    grids: Sequence[tuple[int, int]],
    seeds: int,
    shared: SharedRuns,
) -> dict[str, Any]:
    scenario = with_rival_costs(validated(data, where="table"), costs)
    live = scenario.policies.live
    numbers, machines = range(1, seeds + 1), name if trace is not None else ""
    found: dict[str, Summary] = {}
    owned: list[tuple[Summary, str]] = []
    for pipelines, stages in grids:
        own_grid = None if live is None else live.model_copy(update={"pipelines": pipelines, "stages": stages})
        policies = scenario.policies.model_copy(update={"live": own_grid})
        job = build_job(scenario.model_copy(update={"policies": policies}), trace=trace)
        of_grid = shared.summaries(job, machines=machines, policies=OWN_POLICIES, seeds=numbers)
        owned += [(one, f"{pipelines}x{stages}") for one in of_grid]
        if not found:
            rivals = [policy for policy in available_policies(job.scenario) if policy not in LEFT_OUT]
            asked = [*rivals, "on-demand", "oracle"]
            others = shared.summaries(job, machines=machines, policies=asked, seeds=numbers)
            found = {summary.policy: summary for summary in others}
    own, grid = max(owned, key=lambda pair: _value(pair[0]))
    lazy = max(_value(one) for one, _ in owned if one.policy == "deepspeed-bamboo")
    best = max((found[policy] for policy in rivals), key=_value)
    oracle = _value(found["oracle"])
    return {
        "machines": name,
        "costs": costs,
        "own": round(_value(own), 3),
        "mode": f"{_mode(own)} {grid}",
        "lazy": round(lazy, 3),
        "best_rival": round(_value(best), 3),
        "rival": best.policy,
        "on_demand": round(_value(found["on-demand"]), 3),
        "oracle": round(oracle, 3),
        "share": round(_value(own) / oracle, 3) if oracle else None,
        "fatal": round(own.mean("fatal_losses"), 1),
        **_points(own, oracle),
        "values": {policy: round(_value(summary), 3) for policy, summary in found.items()},  # of the rivals
    }


def _value(summary: Summary) -> float:
    return summary.mean("value")


def _mode(summary: Summary) -> str:
    return {"deepspeed-bamboo": "lazy"}.get(summary.policy, summary.policy.removeprefix("deepspeed-bamboo-"))


def _points(own: Summary, oracle: float) -> dict[str, float]:
    """What lacks to the oracle, in points of all hours, from the ledger; and the rest."""
    hours = own.mean("duration_hours")
    parts = {name: round(100.0 * own.mean(f"{name}_hours") / hours, 1) for name in POINTS}
    lacking = 100.0 * (1.0 - _value(own) / oracle) if oracle else 0.0
    return {**parts, "rest": round(lacking - sum(parts.values()), 1)}


def _table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="value (samples/s per $/h); points lacking to the oracle", title_justify="left")
    names = {
        "model": "model", "precision": "", "machines": "machines", "costs": "rivals", "own": "own", "mode": "mode",
        "lazy": "lazy",
        "best_rival": "best rival", "rival": "", "oracle": "oracle", "share": "share", "fatal": "fatal",
        "reducing": "reduce", "bubble": "bubbles", "uneven": "uneven", "redundant": "replicas", "wasted": "again",
        "paused": "paused", "idle": "idle", "rest": "rest",
    }  # fmt: skip
    for key, heading in names.items():
        table.add_column(heading, justify="left" if key in ("model", "precision", "machines", "rival") else "right")
    for row in rows:
        bold = "bold" if row["own"] >= row["best_rival"] else ""
        table.add_row(*(str(row[key]) for key in names), style=bold)
    return table


if __name__ == "__main__":
    sys.exit(main())
