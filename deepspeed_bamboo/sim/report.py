"""Results for people and programs: a table in the terminal, JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from .console import print_whole, width_of
from .results import Summary

__all__ = ["as_json", "print_table"]

# A terminal gets as many as it has room for, and always the first ones; files and the JSON have all.
_COLUMNS = (
    ("samples/s", "throughput_samples_per_second", ".2f"),
    ("$/h", "cost_dollars_per_hour", ".2f"),
    ("value", "value", ".3f"),
    ("fatal", "fatal_losses", ".1f"),
    ("paused h", "paused_hours", ".2f"),
    ("wasted h", "wasted_hours", ".2f"),
    ("redundant h", "redundant_hours", ".2f"),
    ("idle h", "idle_hours", ".2f"),
    ("preempted", "preemptions", ".1f"),
    ("machines", "instances", ".1f"),
    ("lifetime h", "instance_lifetime_hours", ".2f"),
)
_LEAST_COLUMNS = 3


def as_json(summaries: Sequence[Summary], *, about: Mapping[str, object]) -> str:
    """The results as JSON: one policy's fields at the top, or `policies` by name when there are several.

    Args:
        summaries: one a policy.
        about: what was run; goes to the top as it is.
    """
    if len(summaries) == 1:
        body: dict[str, object] = {**about, "policy": summaries[0].policy, **summaries[0].as_json()}
    else:
        body = {**about, "policies": {summary.policy: summary.as_json() for summary in summaries}}
    return json.dumps(body, indent=1)


def print_table(summaries: Sequence[Summary], *, title: str, console: Console) -> None:
    """One line a policy: means, with half of the 95 % confidence interval where there are several seeds.

    A column that has no room is left out, never cut; where even the first ones have none, lines are longer.
    """
    count = len(_COLUMNS)
    while count > _LEAST_COLUMNS and width_of(_table(summaries, title, count), console) > console.width:
        count -= 1
    print_whole(_table(summaries, title, count), console)


def _table(summaries: Sequence[Summary], title: str, count: int) -> Table:
    """The table with the first ``count`` columns."""
    table = Table(title=title, title_justify="left")
    table.add_column("policy", no_wrap=True)
    for heading, _, _ in _COLUMNS[:count]:
        table.add_column(heading, justify="right", no_wrap=True)
    for summary in summaries:
        table.add_row(summary.policy, *(_cell(summary, name, form) for _, name, form in _COLUMNS[:count]))
    return table


def _cell(summary: Summary, name: str, form: str) -> str:
    mean, ci95 = summary.mean(name), summary.ci95(name)
    return f"{mean:{form}}" if not ci95 else f"{mean:{form}} ±{ci95:{form}}"
