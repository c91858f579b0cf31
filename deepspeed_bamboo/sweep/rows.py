"""A sweep's results: one row per case, judged against the undisturbed run of the same setup."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from deepspeed_bamboo.eventlog.summary import PAUSE_PARTS, FailoverSummary, RunSummary, differences
from deepspeed_bamboo.sweep.job import PAST_LIMIT

RECOMPUTED = ("forwards", "backwards")


@dataclass(frozen=True)
class Row:
    """What became of one case. ``problems`` is empty exactly when it is as it should be."""

    case: str
    seconds: float
    problems: tuple[str, ...]
    failovers: tuple[FailoverSummary, ...] = ()

    @property
    def passed(self) -> bool:
        """Bitwise equal to the undisturbed run, and everything scripted did happen."""
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        """A value that ``json`` can write."""
        return {**asdict(self), "passed": self.passed}


def judge(
    case: str,
    *,
    reference: RunSummary,
    run: RunSummary | None,
    exit_code: int,
    scripted: int,
    happened: int,
    seconds: float,
) -> Row:
    """The row of a case. ``run``: None when it left no events.

    ``scripted`` and ``happened``: numbers of faults, kills from outside included.
    """
    problems = []
    if exit_code == PAST_LIMIT:
        problems.append(f"the job had not ended after {seconds:.0f} s")
    elif exit_code != 0:
        problems.append(f"the job ended with exit code {exit_code}")
    if happened != scripted:
        problems.append(f"{happened} of {scripted} scripted faults happened")
    if run is None:
        problems.append("the job left no events")
    else:
        if scripted and not run.failovers:
            problems.append("no failover was logged")
        problems += differences(reference, run)
    return Row(case, seconds, tuple(problems), () if run is None else run.failovers)


def table_line(row: Row) -> str:
    """A row as one line of text: verdict, case, the worst pause in its parts."""
    verdict = "equal" if row.passed else "WRONG"
    worst = max(row.failovers, key=lambda failover: failover.pause_seconds.get("total", 0.0), default=None)
    pause = "" if worst is None else "  ".join(_part(worst, part) for part in PAUSE_PARTS)
    again = "  ".join(f"{kind} {sum(f.recomputed.get(kind, 0) for f in row.failovers)}" for kind in RECOMPUTED)
    return f"{verdict}  {row.case:<40} {row.seconds:6.1f} s  {pause}  again: {again}".rstrip()


def totals(rows: Sequence[Row]) -> dict[str, Any]:
    """How many cases, how many equal, and the median and maximum of each part of the pause in seconds."""
    return {
        "cases": len(rows),
        "equal": sum(row.passed for row in rows),
        "pause_seconds": {
            part: {"median": statistics.median(values), "maximum": max(values)}
            for part in PAUSE_PARTS
            if (values := _values(rows, part))
        },
    }


def total_lines(rows: Sequence[Row]) -> list[str]:
    """The totals as text, and what was wrong."""
    found = totals(rows)
    lines = [f"{found['equal']} of {found['cases']} cases bitwise equal to the undisturbed run"]
    for part, values in found["pause_seconds"].items():
        lines.append(f"  {part:<10} median {values['median']:.3f} s, maximum {values['maximum']:.3f} s")
    for row in rows:
        lines += [f"WRONG {row.case}: {problem}" for problem in row.problems]
    return lines


def _values(rows: Iterable[Row], part: str) -> list[float]:
    return [f.pause_seconds[part] for row in rows for f in row.failovers if part in f.pause_seconds]


def _part(failover: FailoverSummary, part: str) -> str:
    seconds = failover.pause_seconds.get(part)
    return f"{part} {'-' if seconds is None else f'{seconds:.3f}'}"
