"""``ds_bamboo schedule``: draw what every worker does in an iteration, and in the rest of one after a loss."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from deepspeed_bamboo.config.section import OffloadTarget, RedundancyConfig
from deepspeed_bamboo.core.grid import Coordinate, Grid
from deepspeed_bamboo.core.instructions import COMPUTE, Op
from deepspeed_bamboo.core.interpret import Execution, interpret
from deepspeed_bamboo.core.placement import Placement
from deepspeed_bamboo.core.planning import bubble_fit, plan_iteration
from deepspeed_bamboo.core.recovery import progress_after_loss
from deepspeed_bamboo.core.redundancy import Fit
from deepspeed_bamboo.core.render import LEGEND, bubble_share, grid_rows, text_grid
from deepspeed_bamboo.core.schedule import Mode, Plan
from deepspeed_bamboo.core.timeline import Costs, length
from deepspeed_bamboo.core.trace import chrome_trace
from deepspeed_bamboo.core.verify import verify
from deepspeed_bamboo.options import file_path

_MOST_PASSES = 100_000
_MOST_SLOTS = 2_000_000  # of all passes: each is a letter of what is printed

if TYPE_CHECKING:
    _SubParsers = argparse._SubParsersAction[argparse.ArgumentParser]


def add_parser(subparsers: _SubParsers) -> None:
    """Register ``schedule`` with its options; ``args.run(args)`` executes it and returns the exit status."""
    parser = subparsers.add_parser(
        "schedule",
        help="draw the schedule of an iteration and of its recovery after a loss",
        description="Draw the schedule of an iteration; with --lost and --at, what the survivors do after a loss.",
    )
    parser.add_argument("--stages", type=int, required=True, metavar="P", help="stages of a pipeline")
    parser.add_argument("--micro-batches", type=int, required=True, metavar="M", help="micro-batches of an iteration")
    parser.add_argument("--pipelines", type=int, default=1, metavar="D", help="pipelines (default: 1)")
    modes = [mode.value for mode in (Mode.OFF, Mode.LAZY, Mode.EAGER, Mode.FULL)]
    mode, offload = (RedundancyConfig.model_fields[name].default for name in ("mode", "offload"))
    parser.add_argument("--mode", choices=modes, default=mode, help=f"redundancy.mode (default: {mode})")
    parser.add_argument(
        "--offload",
        choices=get_args(OffloadTarget),
        help=f"redundancy.offload, for eager (default: {offload})",
    )
    parser.add_argument("--overlap", action="store_true", help="redundancy.overlap, for eager")
    parser.add_argument(
        "--zero",
        type=int,
        choices=(0, 1),
        default=1,
        help="0: every pipeline holds the state of all stages, as without ZeRO and bf16 (default: 1, it does not)",
    )
    parser.add_argument(
        "--lost",
        type=int,
        action="append",
        default=[],
        metavar="S",
        help="stage of pipeline 0 to lose; repeat for more",
    )
    parser.add_argument(
        "--at",
        type=int,
        metavar="SLOT",
        help="time slot at whose beginning they are lost (default: in the middle of the iteration)",
    )
    parser.add_argument("--forward-slots", type=int, default=1, metavar="N", help="slots of a forward (default: 1)")
    parser.add_argument("--backward-slots", type=int, default=2, metavar="N", help="slots of a backward (default: 2)")
    parser.add_argument("--programs", action="store_true", help="list every worker's instructions as well")
    parser.add_argument(
        "--trace", type=file_path, metavar="FILE", help="write a Chrome trace (JSON); nothing if not given"
    )
    parser.add_argument(
        "--picture", type=file_path, metavar="FILE", help="write a picture (needs the plot extra: matplotlib)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print what ``args`` ask for. Returns 0, or 2 after a message, for values that are not possible."""
    try:
        shown = _scenario(args)
        if args.trace is not None:
            trace = chrome_trace(shown.execution.timeline, placement=shown.plan.placement)
            args.trace.write_text(json.dumps(trace))
        if args.picture is not None:
            _draw_picture(shown, args.picture)
    except OSError as error:
        option = "--trace" if args.trace is not None and error.filename == str(args.trace) else "--picture"
        named = args.trace if option == "--trace" else args.picture
        print(f"ds_bamboo schedule: {option} {named}: can't be written ({error.strerror}); give another path",
              file=sys.stderr)  # fmt: skip
        return 2
    except ValueError as error:
        print(f"ds_bamboo schedule: {error}", file=sys.stderr)
        return 2
    print("\n".join(shown.lines))
    return 0


@dataclass(frozen=True)
class _Shown:
    """What a picture or trace of the request shows, and what is printed."""

    plan: Plan
    execution: Execution
    lines: tuple[str, ...]


def _scenario(args: argparse.Namespace) -> _Shown:
    grid = Grid(args.pipelines, args.stages)
    passes = grid.pipelines * grid.stages * args.micro_batches
    if passes > _MOST_PASSES:
        raise ValueError(
            f"{grid.pipelines} x {grid.stages} stages with {args.micro_batches} micro-batches are {passes} passes, and "
            f"at most {_MOST_PASSES} can be drawn; give fewer"
        )
    slots = passes * (args.forward_slots + args.backward_slots)
    if slots > _MOST_SLOTS:
        raise ValueError(
            f"{passes} passes with --forward-slots {args.forward_slots} and --backward-slots {args.backward_slots} are "
            f"{slots} slots, and at most {_MOST_SLOTS} can be drawn; give fewer: what counts is how they compare"
        )
    workers = [f"w{rank}" for rank in range(len(grid))]
    # Without shadows a stage lives on in another pipeline only, and there only where pipelines hold the same.
    protected = args.mode != Mode.OFF.value
    placement = Placement.initial(grid, workers, protected=protected, alike=args.zero == 0)
    costs = Costs(args.forward_slots, args.backward_slots)
    mode = _mode(args)
    plan = plan_iteration(placement, micro_batches=args.micro_batches, mode=mode, costs=costs)
    execution = verify(plan, costs=costs)
    lines = [
        f"{grid.pipelines} x {grid.stages} stages, {args.micro_batches} micro-batches, mode {args.mode}; "
        f"a forward takes {costs.forward} slots, a backward {costs.backward}",
        "",
        text_grid(execution.timeline, placement=placement),
        LEGEND,
        "",
        *_figures(plan, execution, costs),
    ]
    if args.programs:
        lines += ["", *_programs(plan)]
    if not args.lost:
        if args.at is not None:
            raise ValueError(f"--at {args.at} without --lost; name the stage that is lost")
        return _Shown(plan, execution, tuple(lines))
    at = length(execution.timeline) // 2 if args.at is None else args.at
    recovered = _recovery(plan, execution, lost=args.lost, at=at, costs=costs)
    lines += ["", *recovered.lines]
    if args.programs:
        lines += ["", *_programs(recovered.plan)]
    return _Shown(recovered.plan, recovered.execution, tuple(lines))


def _mode(args: argparse.Namespace) -> Mode:
    """The mode to plan. Raises ValueError for options that would change nothing in it."""
    if args.mode != Mode.EAGER.value and (args.overlap or args.offload is not None):
        option = "--overlap" if args.overlap else f"--offload {args.offload}"
        raise ValueError(f"{option} changes the schedule of mode eager only, and this is {args.mode}; add --mode eager")
    offload = args.offload or RedundancyConfig.model_fields["offload"].default
    return Mode.planned(args.mode, offload=offload, overlap=args.overlap)


def _figures(plan: Plan, execution: Execution, costs: Costs) -> list[str]:
    """Bubble share, what fits, and what the rest costs, in words."""
    lazy = plan_iteration(plan.placement, micro_batches=plan.micro_batches, costs=costs)
    plain = interpret(lazy, costs=costs).timeline
    slots, plain_slots = length(execution.timeline), length(plain)
    workers = len(plan.programs)
    lines = [
        f"bubbles: {bubble_share(plain, workers=workers):.1%} of {workers} x {plain_slots} slots without redundancy"
    ]
    if plan.mode.redundant_ops:
        fits = bubble_fit(plan.placement, micro_batches=plan.micro_batches, mode=plan.mode, costs=costs)
        lines += _fit_lines(plan, fits)
        lines.append(
            f"bubbles left: {bubble_share(execution.timeline, workers=workers):.1%} of {workers} x {slots} slots"
        )
        hiding = "" if plan.mode.redundant_passes_are_optional else " if what overlaps hides nothing, 0 if it hides all"
        lines.append(f"extra time: {slots - plain_slots} slots ({slots / plain_slots - 1:.1%}){hiding}")
    return lines


def _fit_lines(plan: Plan, fits: Sequence[Fit]) -> list[str]:
    wanted = plan.micro_batches * len(plan.placement.shadows)
    if wanted and plan.mode.redundant_passes_are_optional:
        fitting = sum(fit.forwards for fit in fits)
        return [f"FRC in bubbles: {fitting} of {wanted} ({fitting / wanted:.1%}); the others are left out"]
    lines = []
    for word, fitting, total in (
        ("FRC", sum(fit.forwards_in_bubbles for fit in fits), sum(fit.forwards for fit in fits)),
        ("BRC", sum(fit.backwards_in_bubbles for fit in fits), sum(fit.backwards for fit in fits)),
    ):
        if total:
            lines.append(f"{word} in bubbles: {fitting} of {total} ({fitting / total:.1%}); the others overlap")
    return lines


def _recovery(plan: Plan, undisturbed: Execution, *, lost: Sequence[int], at: int, costs: Costs) -> _Shown:
    """What happens when the workers of the stages ``lost`` of pipeline 0 die at the beginning of slot ``at``."""
    before, end = plan.placement, length(undisturbed.timeline)
    bad = [stage for stage in lost if not 0 <= stage < before.grid.stages]
    if bad:
        raise ValueError(f"--lost {bad[0]} is no stage; they are 0..{before.grid.stages - 1}")
    if not 0 <= at <= end:
        raise ValueError(f"--at {at} is outside the iteration; its slots are 0..{end - 1} ({end}: after the last)")
    cut = interpret(plan, costs=costs, until=at)
    after, fatal = before.without(before.owner(Coordinate(0, stage)) for stage in lost)
    if after is None:
        names = ", ".join(map(str, fatal))
        remedy = _remedy(before, mode=plan.mode)
        raise ValueError(f"losing these is fatal: no live worker holds {names}; {remedy}")
    progress, redundant = progress_after_loss(before, after, progress=cut.progress, stored=cut.redundant)
    rest = plan_iteration(
        after, micro_batches=plan.micro_batches, progress=progress, redundant=redundant, mode=plan.mode, costs=costs
    )
    execution = verify(rest, progress, redundant=redundant, costs=costs)
    names = ", ".join(str(Coordinate(0, stage)) for stage in lost)
    slots = length(execution.timeline)
    lines = (
        f"lost at slot {at}: {names}. The rest of the iteration, its slots counted from there:",
        "",
        text_grid(execution.timeline, placement=after),
        "",
        *_repeated(before, after, cut, execution),
        f"extra time: {at + slots - end} slots ({(at + slots) / end - 1:.1%}), the pause not counted",
    )
    return _Shown(rest, execution, lines)


def _remedy(before: Placement, *, mode: Mode) -> str:
    """What to do about a fatal loss."""
    if before.shadows:
        return "lose fewer or no neighbours"
    if mode is Mode.OFF:
        return "mode off keeps no shadows, choose another --mode"
    return "one worker has no neighbour that could keep its shadow; add --stages or --pipelines"


def _repeated(before: Placement, after: Placement, cut: Execution, rest: Execution) -> list[str]:
    """How much of what lost workers had done is done again."""
    lines = []
    for c, owner in after.owners:
        if before.owner(c) == owner:
            continue
        runs = [t.instruction for t in rest.timeline if t.instruction.coordinate == c]
        again = [
            sum(i.op is op and i.micro_batch is not None and i.micro_batch < done for i in runs)
            for op, done in ((Op.FNC, cut.progress[c].forwards), (Op.BNC, cut.progress[c].backwards))
        ]
        lines.append(
            f"{c}: worker {owner} takes over from {before.owner(c)}; it repeats {again[0]} of "
            f"{cut.progress[c].forwards} forwards and {again[1]} of {cut.progress[c].backwards} backwards"
        )
    return lines


def _programs(plan: Plan) -> list[str]:
    """Every worker's instructions, a line each worker and pass, so that what belongs together stands together."""
    lines = []
    for worker, program in plan.programs:
        lines.append(f"program of {worker}:")
        line: list[str] = []
        for instruction in program:
            line.append(str(instruction))
            if instruction.op in COMPUTE or instruction is program[-1]:
                lines.append("  " + ", ".join(line))
                line = []
    return lines


def _draw_picture(shown: _Shown, path: Path) -> None:
    """Raises ValueError, with the command that installs it, without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(
            "--picture needs matplotlib, which is not installed; in the directory of this project's source, "
            'pip install ".[plot]" installs it'
        ) from error
    rows = grid_rows(shown.execution.timeline, placement=shown.plan.placement)
    colours = {Op.FNC: "#6fa8dc", Op.BNC: "#93c47d", Op.FRC: "#f6b26b", Op.BRC: "#c27ba0"}
    slots = length(shown.execution.timeline)
    figure = Figure(figsize=(max(4.0, 0.35 * slots), 1.0 + 0.4 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    for y, (_, passes) in enumerate(rows):
        for timed in passes:
            op, micro_batch = timed.instruction.op, timed.instruction.micro_batch
            width = timed.end - timed.start
            axes.barh(y, width, left=timed.start, height=0.9, color=colours[op], edgecolor="white")
            axes.text(timed.start + width / 2, y, str(micro_batch), ha="center", va="center", fontsize=7)
    axes.set_yticks(range(len(rows)), [label for label, _ in rows])
    axes.invert_yaxis()
    axes.set_xlabel("time slots")
    axes.legend(
        [axes.barh(0, 0, color=colour) for colour in colours.values()],
        [op.value for op in colours],
        ncols=len(colours),
        loc="lower center",
        bbox_to_anchor=(0.5, 1.0),
        frameon=False,
    )
    figure.savefig(path)
