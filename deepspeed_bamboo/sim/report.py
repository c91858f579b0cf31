"""Results for people and programs: a table in the terminal, JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from .console import print_whole, width_of
from .results import LEAST_FOR_BANDS, Summary

__all__ = ["as_json", "never_trained", "print_table"]

# A terminal gets as many as it has room for, and always the first ones; files and the JSON have all.
_COLUMNS = (
    ("value", "value", ".2f"),
    ("hours", "duration_hours", ".1f"),
    ("dollars", "cost_dollars", ".0f"),
    ("$/M samples", "dollars_per_million_samples", ".1f"),
    ("samples/s", "throughput_samples_per_second", ".2f"),
    ("$/h", "cost_dollars_per_hour", ".2f"),
    ("finished", "completed", ""),
    ("fatal", "fatal_losses", ".1f"),
    ("paused h", "paused_hours", ".2f"),
    ("wasted h", "wasted_hours", ".2f"),
    ("redundant h", "redundant_hours", ".2f"),
    ("idle h", "idle_hours", ".2f"),
    ("preempted", "preemptions", ".1f"),
    ("machines", "instances", ".1f"),
    ("lifetime h", "instance_lifetime_hours", ".2f"),
)
# For these the spread of the runs is shown: they are what people decide by.
_BANDS = frozenset({"value", "duration_hours"})
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
    """One line a policy: means over the seeds; for what people decide by also how far runs spread.

    A column that has no room is left out, never cut; where even the first ones have none, lines are longer. Below
    the table stands which policies never trained.
    """
    count = len(_COLUMNS)
    while count > _LEAST_COLUMNS and width_of(_table(summaries, title, count), console) > console.width:
        count -= 1
    print_whole(_table(summaries, title, count), console)
    for note in never_trained(summaries):
        console.print(note)


def never_trained(summaries: Sequence[Summary]) -> list[str]:
    """A sentence for each policy that completed no step in any run, with how many machines it had for how long."""
    return [
        f"{summary.policy} never trained: with {summary.mean('instances'):.1f} machines on average it completed no "
        f"step in {summary.mean('duration_hours'):.2f} h. Either they are too few for its grid, or a run is too short "
        "for boot, start and a step: raise the capacity, choose a smaller grid, or let it last longer"
        for summary in summaries
        if not any(run.samples for run in summary.runs)
    ]


def _table(summaries: Sequence[Summary], title: str, count: int) -> Table:
    """The table with the first ``count`` columns."""
    runs = len(summaries[0].runs)
    caption = None if runs < 2 else "in brackets: where nine of ten runs lie"
    if 1 < runs < LEAST_FOR_BANDS:
        caption = f"in brackets: the least and the most of {runs} runs"
    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    table.add_column("policy", no_wrap=True)
    for heading, _, _ in _COLUMNS[:count]:
        table.add_column(heading, justify="right", no_wrap=True)
    for summary in summaries:
        table.add_row(summary.policy, *(_cell(summary, name, form) for _, name, form in _COLUMNS[:count]))
    return table


def _cell(summary: Summary, name: str, form: str) -> str:
    if name == "completed":
        return f"{sum(run.completed for run in summary.runs):.0f}/{len(summary.runs)}"
    mean, band = summary.mean(name), summary.spread(name) if name in _BANDS else None
    if not math.isfinite(mean):
        return "-"
    # Rich reads square brackets as mark-up unless the first is escaped.
    return f"{mean:{form}}" if band is None else f"{mean:{form}} \\[{band[0]:{form}}, {band[1]:{form}}]"
