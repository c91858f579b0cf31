"""``ds_bamboo compare``: two runs' losses side by side, the pauses, and whether they are bitwise equal."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from deepspeed_bamboo.eventlog.summary import PAUSE_PARTS, FailoverSummary, RunSummary, differences, load_run
from deepspeed_bamboo.options import file_path, number

_BAR_WIDTH = 10
_LINE_WIDTH = 80
_SHOWN_LOST = 3


def add_parser(subparsers: Any) -> None:
    """Register ``compare`` with the subparsers of ``ds_bamboo``."""
    parser = subparsers.add_parser(
        "compare",
        help="compare the event logs of two runs bit by bit",
        description="Prints the training losses of two runs side by side, the parts of each pause, and whether these "
        "losses and the digests are bitwise equal. Event logs do not have what eval_batch returned. The exit code is 1 "
        "if they differ, or if a condition below is not met.",
    )
    parser.add_argument("reference", type=file_path, help="event log directory of the undisturbed run")
    parser.add_argument("other", type=file_path, help="event log directory of the run to compare with it")
    parser.add_argument("--names", nargs=2, default=("undisturbed", "disturbed"), metavar=("A", "B"), help="headings")
    parser.add_argument("--failovers", type=int, metavar="N", help="the other run must have had N failovers")
    parser.add_argument("--minimum-fall", type=number, metavar="PERCENT", help="the loss must have fallen by this much")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Compare as ``arguments`` say; returns 0 when all is as it should be. Raises EventLogError."""
    reference, other = load_run(arguments.reference), load_run(arguments.other)
    for name, summary in zip(arguments.names, (reference, other), strict=True):
        for line in read(summary, name=name):
            print(line)
    for line in curves(reference, other, names=tuple(arguments.names)):
        print(line)
    print()
    for line in pauses(other):
        print(line)
    problems = differences(reference, other)
    for name, digest in zip(arguments.names, (reference.digest, other.digest), strict=True):
        print(f"digest {name}:\n  {digest}")
    problems += _unmet(reference, other, failovers=arguments.failovers, minimum_fall=arguments.minimum_fall)
    for problem in problems:
        print(f"FAILED: {problem}")
    if not problems:
        print(f"equal: every training loss and the digest, bit for bit; the loss fell by {reference.fall:.0%}")
    return 1 if problems else 0


def read(summary: RunSummary, *, name: str) -> Iterator[str]:
    """Which run of its log this is, and which it continues; nothing where events name no run."""
    if not summary.parts:
        return
    text = f"{name}: run {summary.parts[-1]}"
    if len(summary.parts) > 1:
        text += f", which continues {', '.join(reversed(summary.parts[:-1]))}"
    if summary.runs > len(summary.parts):
        text += f"; its log has {summary.runs} runs, and this is the newest"
    yield from textwrap.wrap(text, _LINE_WIDTH, subsequent_indent="    ")


def curves(reference: RunSummary, other: RunSummary, *, names: tuple[str, ...]) -> Iterator[str]:
    """Both loss curves as lines of text, one per step, with bars to the same scale."""
    steps = sorted({*reference.losses, *other.losses})
    highest = max([*reference.losses.values(), *other.losses.values()], default=0.0)
    failed = {failover.step: failover for failover in other.failovers}
    column = 9 + _BAR_WIDTH
    yield f"step  {names[0]:<{column}}{names[1]:<{column}}"
    for step in steps:
        one, another = reference.losses.get(step), other.losses.get(step)
        verdict = "equal" if repr(one) == repr(another) else "DIFFERENT"
        note = f"  <- {_note(failed[step].lost)} taken over" if step in failed else ""
        left, right = (f"{_curve_cell(loss, highest=highest):<{column}}" for loss in (one, another))
        yield f"{step:>4}  {left}{right}{verdict}{note}"


def pauses(summary: RunSummary) -> Iterator[str]:
    """Each failover of a run with its pause split into its parts."""
    for failover in summary.failovers:
        yield f"failover in step {failover.step}: {_shown(failover.lost)} lost; epoch {failover.epoch} begins"
        yield from textwrap.wrap(
            f"pause {_parts(failover)}", _LINE_WIDTH, initial_indent="  ", subsequent_indent="    "
        )
        if failover.kill_to_recompute_seconds is not None:
            yield f"  (from the kill to the first recomputed instruction {failover.kill_to_recompute_seconds:.3f} s)"
    if summary.failovers:
        yield "  (an epoch is a membership that all workers have agreed on; a loss begins one)"


def _parts(failover: FailoverSummary) -> str:
    """The whole pause, and what it consists of."""
    seconds = failover.pause_seconds
    known = [f"{part} {seconds[part]:.3f} s" for part in PAUSE_PARTS if part in seconds and part != "total"]
    return f"{seconds['total']:.3f} s: {', '.join(known)}" if "total" in seconds else ", ".join(known) or "not known"


def _note(lost: Sequence[str]) -> str:
    """The lost coordinates, in what is left of a line."""
    return f"{lost[0]} lost and" if len(lost) == 1 else f"{len(lost)} lost stages"


def _shown(lost: Sequence[str]) -> str:
    """The lost coordinates, as many as there is room for."""
    more = f" and {len(lost) - _SHOWN_LOST} more" if len(lost) > _SHOWN_LOST else ""
    return ", ".join(lost[:_SHOWN_LOST]) + more


def _curve_cell(loss: float | None, *, highest: float) -> str:
    if loss is None:
        return "-"
    filled = round(_BAR_WIDTH * loss / highest) if 0 <= loss <= highest < float("inf") and highest > 0 else 0
    return f"{loss:<7.4f} {'#' * filled}"


def _unmet(
    reference: RunSummary, other: RunSummary, *, failovers: int | None, minimum_fall: float | None
) -> Iterator[str]:
    if failovers is not None and len(other.failovers) != failovers:
        yield f"{len(other.failovers)} failovers instead of {failovers}; the fault did not have its effect"
    if minimum_fall is not None and not reference.fall * 100 >= minimum_fall:
        yield f"the loss fell by {reference.fall:.1%} only; expected are {minimum_fall:g} %"
