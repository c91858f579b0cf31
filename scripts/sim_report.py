"""All policies on the published traces: one table, one plot.

    python scripts/sim_report.py --traces FOLDER --out runs/sim-report

FOLDER has the published traces: aws-p3-us-east.csv and gcp-a100-us-east1b.txt (docs/simulator.md says where from).
Needs the extra `plot`. Writes report.json and comparison.png to the folder and prints the table: the value of every
policy on the p3 trace, its four one-hour segments and the GCP trace, and whether this project's policy beats Bamboo,
checkpointing and Varuna there, and how near it is to the oracle. Two more tables, of docs/simulator.md:

    python scripts/sim_report.py --traces FOLDER --sensitivity    other restarts of the rivals, other overheads of ours
    python scripts/sim_report.py --traces FOLDER --oddities       what each oddity of the authors' simulator is worth
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from deepspeed_bamboo.sim.build import available_policies
from deepspeed_bamboo.sim.console import table_console
from deepspeed_bamboo.sim.errors import SimulationError
from deepspeed_bamboo.sim.jobs import build_job
from deepspeed_bamboo.sim.plot import plot_comparison
from deepspeed_bamboo.sim.results import Summary
from deepspeed_bamboo.sim.runner import run_one, run_seeds
from deepspeed_bamboo.sim.scenario import OdditySpec, load_preset, validated
from deepspeed_bamboo.sim.traces import Trace, read_trace, segment

OURS = "deepspeed-bamboo"
RIVALS = ("bamboo-published", "bamboo", "checkpoint", "varuna")
SEGMENTS = {
    "p3 5.5-6.5 h (high, dense)": (5.5, 6.5),
    "p3 1.5-2.5 h (high, sparse)": (1.5, 2.5),
    "p3 8-9 h (low, dense)": (8.0, 9.0),
    "p3 10-11 h (low, sparse)": (10.0, 11.0),
}


def traces_in(folder: Path) -> dict[str, Trace]:
    """The six traces, by the name under which they are shown."""
    p3 = read_trace(folder / "aws-p3-us-east.csv", generator=random.Random(0))
    gcp = read_trace(folder / "gcp-a100-us-east1b.txt", generator=random.Random(0))
    parts = {name: segment(p3, from_hours=start, to_hours=end) for name, (start, end) in SEGMENTS.items()}
    return {"p3, 11.4 h": p3, **parts, "gcp a100, 27 h": gcp}


def compare(preset: str, traces: dict[str, Trace]) -> dict[str, list[Summary]]:
    """Every policy of a preset on every trace."""
    results = {}
    for name, trace in traces.items():
        job = build_job(load_preset(preset), trace=trace)
        results[name] = run_seeds(job, policies=available_policies(job.scenario), seeds=[1])
    return results


def table_of(preset: str, results: dict[str, list[Summary]]) -> Table:
    """Values by policy and trace; below, this project's against the best rival and the oracle."""
    table = Table(title=f"{preset}: value, samples/s per $/h", title_justify="left")
    table.add_column("policy", no_wrap=True)
    for name in results:
        table.add_column(name, justify="right")
    values = {name: {one.policy: one.mean("value") for one in found} for name, found in results.items()}
    for policy in next(iter(values.values())):
        table.add_row(policy, *(f"{by_policy[policy]:.3f}" for by_policy in values.values()))
    table.add_section()
    for rival in RIVALS:
        gains = (f"{100 * (by_policy[OURS] / by_policy[rival] - 1):+.1f} %" for by_policy in values.values())
        table.add_row(f"{OURS} over {rival}", *gains)
    table.add_row(f"{OURS} of oracle", *(f"{100 * one[OURS] / one['oracle']:.1f} %" for one in values.values()))
    return table


def varied(preset: str, trace: Trace, policy: str, changes: dict[str, dict[str, object]]) -> float:
    """A policy's value on a trace with some parameters changed: {"varuna": {"restart_seconds": 30}}."""
    data = load_preset(preset).model_dump(exclude_none=True)
    for section, values in changes.items():
        data["policies"][section].update(values)
    job = build_job(validated(data, where="report"), trace=trace)
    return run_one(job, policy=policy, seed=1).value


def sensitivity_table(traces: dict[str, Trace]) -> Table:
    """Values when the rivals restart and checkpoint otherwise, and when our overheads are other than assumed."""
    table = Table(title="bert: value under other assumptions", title_justify="left")
    table.add_column("policy and assumption", no_wrap=True)
    for name in traces:
        table.add_column(name, justify="right")
    rows: list[tuple[str, str, dict[str, dict[str, object]]]] = []
    for restart, every in ((30, 60), (60, 60), (120, 60), (60, 600), (120, 600)):
        change: dict[str, object] = {"restart_seconds": restart, "checkpoint_seconds": every}
        rows.append((f"varuna, restart {restart}+14 s, checkpoints {every} s", "varuna", {"varuna": change}))
    for lazy in (0.0, 0.01, 0.04, 0.08, 0.12):
        rows.append((f"{OURS}, replicas cost {lazy:.0%}", OURS, {"live": {"lazy_overhead": lazy}}))
    for hosting in (0.0, 0.05, 0.10):
        rows.append((f"{OURS}, hosting costs {hosting:.0%}", OURS, {"live": {"hosting_overhead": hosting}}))
    for pause in (1.0, 10.0, 30.0):
        rows.append((f"{OURS}, regroup {pause:.0f} s", OURS, {"live": {"regroup_seconds": pause}}))
    for label, policy, changes in rows:
        table.add_row(label, *(f"{varied('bert', trace, policy, changes):.3f}" for trace in traces.values()))
    return table


def oddities_table(trace: Trace, *, seeds: int) -> Table:
    """Bamboo on the p3 trace and on the market, with all oddities, without one of them, without any."""
    table = Table(title=f"Bamboo's oddities: p3 trace (12 h), market (p = 0.5, {seeds} seeds)", title_justify="left")
    table.add_column("switched off")
    for heading in ("p3 samples/s", "p3 value", "p3 steps", "p3 fatal", "market samples/s", "market value"):
        table.add_column(heading, justify="right")
    names = list(OdditySpec.model_fields)
    for label, off in (("none", []), *((name, [name]) for name in names), ("all", names)):
        cells = []
        for preset, recorded, hours in (("bert", trace, 12.0), ("bert-published", None, None)):
            data = load_preset(preset).model_dump(exclude_none=True)
            data["policies"]["bamboo"]["oddities"] = dict.fromkeys(off, False)
            data["run"] |= {"window": "training", "value": "mean_of_ratios"}
            data["run"] |= {"duration_hours": hours} if hours else {}
            data["market"]["removal_probability"] = 0.5
            job = build_job(validated(data, where="report"), trace=recorded)
            numbers = range(1, 2 if recorded else seeds + 1)
            (found,) = run_seeds(job, policies=["bamboo-published"], seeds=numbers)
            cells += [f"{found.mean('throughput_samples_per_second'):.2f}", f"{found.mean('value'):.3f}"]
            if recorded:
                cells += [f"{found.mean('steps'):.0f}", f"{found.mean('fatal_losses'):.0f}"]
        table.add_row(label, *cells)
    return table


def main(arguments: Sequence[str]) -> int:
    """Print the tables and write the files; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True, help="folder of the two trace files")
    parser.add_argument("--out", type=Path, default=Path("runs/sim-report"), help="folder for the results")
    parser.add_argument("--presets", default="bert,gpt2", help="comma-separated (default bert,gpt2)")
    parser.add_argument("--sensitivity", action="store_true", help="print that table instead")
    parser.add_argument("--oddities", action="store_true", help="print that table instead")
    parser.add_argument("--seeds", type=int, default=100, help="of the oddities' market (default 100)")
    options = parser.parse_args(arguments)
    console = table_console()
    try:
        traces = traces_in(options.traces)
        if options.sensitivity:
            console.print(sensitivity_table(traces))
            return 0
        if options.oddities:
            console.print(oddities_table(traces["p3, 11.4 h"], seeds=options.seeds))
            return 0
        options.out.mkdir(parents=True, exist_ok=True)
        written = {}
        for preset in options.presets.split(","):
            results = compare(preset, traces)
            console.print(table_of(preset, results))
            plot_comparison(results, path=options.out / f"comparison-{preset}.png")
            written[preset] = {
                name: {summary.policy: summary.as_json() for summary in found} for name, found in results.items()
            }
    except SimulationError as error:
        print(f"sim_report: {error}", file=sys.stderr)
        return 2
    (options.out / "report.json").write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    for trace in traces.values():
        for repair in trace.repairs:
            console.print(f"repaired: {repair}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
