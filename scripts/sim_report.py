"""All policies on the published traces: one table, one plot.

    python scripts/sim_report.py --traces ../shared/traces --out runs/sim-report

Needs the extra `plot`. Writes report.json and comparison.png to the folder and prints the table: the value of every
policy on the p3 trace, its four one-hour segments and the GCP trace, and whether this project's policy beats Bamboo,
checkpointing and Varuna there, and how near it is to the oracle.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from deepspeed_bamboo.sim.build import available_policies
from deepspeed_bamboo.sim.errors import SimulationError
from deepspeed_bamboo.sim.jobs import build_job
from deepspeed_bamboo.sim.plot import plot_comparison
from deepspeed_bamboo.sim.results import Summary
from deepspeed_bamboo.sim.runner import run_seeds
from deepspeed_bamboo.sim.scenario import load_preset
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


def main(arguments: Sequence[str]) -> int:
    """Print the tables and write the files; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, default=Path("../shared/traces"), help="folder of the two trace files")
    parser.add_argument("--out", type=Path, default=Path("runs/sim-report"), help="folder for the results")
    parser.add_argument("--presets", default="bert,gpt2", help="comma-separated (default bert,gpt2)")
    options = parser.parse_args(arguments)
    console = Console()
    try:
        traces = traces_in(options.traces)
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
