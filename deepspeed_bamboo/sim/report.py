"""Results for people and programs: a table in the terminal, JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from .results import Summary

__all__ = ["as_json", "print_table"]

_COLUMNS = (
    ("samples/s", "throughput_samples_per_second", ".2f"),
    ("$/h", "cost_dollars_per_hour", ".2f"),
    ("value", "value", ".3f"),
    ("fatal", "fatal_losses", ".1f"),
    ("paused h", "paused_hours", ".2f"),
)
# Shown where the terminal has room for them; the JSON has all.
_MORE_COLUMNS = (
    ("wasted h", "wasted_hours", ".2f"),
    ("redundant h", "redundant_hours", ".2f"),
    ("idle h", "idle_hours", ".2f"),
    ("preempted", "preemptions", ".1f"),
    ("machines", "instances", ".1f"),
    ("lifetime h", "instance_lifetime_hours", ".2f"),
)
_WIDE = 130


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
    """One line a policy: means, with half of the 95 % confidence interval where there are several seeds."""
    table = Table(title=title, title_justify="left")
    table.add_column("policy", no_wrap=True)
    columns = (*_COLUMNS, *_MORE_COLUMNS) if console.width >= _WIDE else _COLUMNS
    for heading, _, _ in columns:
        table.add_column(heading, justify="right", no_wrap=True)
    for summary in summaries:
        table.add_row(summary.policy, *(_cell(summary, name, form) for _, name, form in columns))
    console.print(table)


def _cell(summary: Summary, name: str, form: str) -> str:
    mean, ci95 = summary.mean(name), summary.ci95(name)
    return f"{mean:{form}}" if not ci95 else f"{mean:{form}} ±{ci95:{form}}"
