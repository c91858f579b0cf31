"""``ds_bamboo plan``: which worker would host what, why, and what the loss of each zone and node would cost."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, get_args

from deepspeed_bamboo.cli.node_files import read_placement, read_profile, read_sites
from deepspeed_bamboo.cli.plan_memory import HEADING as MEMORY_HEADING
from deepspeed_bamboo.cli.plan_memory import LEGEND as MEMORY_LEGEND
from deepspeed_bamboo.cli.plan_memory import answer, asked_for, memory_rows, micro_batches, too_little
from deepspeed_bamboo.cli.plan_times import HEADING, legend, loss_times
from deepspeed_bamboo.cli.text_layout import wrapped
from deepspeed_bamboo.config.section import RedundancyConfig, RedundancyMode
from deepspeed_bamboo.core.grid import Grid
from deepspeed_bamboo.core.loss_cost import LossCost, fatal_pairs, loss_cost
from deepspeed_bamboo.core.placement import Placement, WorkerId
from deepspeed_bamboo.core.placing.balance import Balanced, balance
from deepspeed_bamboo.core.placing.holding import Memory
from deepspeed_bamboo.core.placing.sites import WorkerSite
from deepspeed_bamboo.core.placing.solver import Decision, decide
from deepspeed_bamboo.core.timing import Profile
from deepspeed_bamboo.options import file_path, filled, path_text, positive

if TYPE_CHECKING:
    _SubParsers = argparse._SubParsersAction[argparse.ArgumentParser]

_SHOWN_COORDINATES = 6
_COLUMNS = 80  # of what is no table
_EXIT_FATAL = 3
_MOST_COORDINATES, _MOST_MICRO_BATCHES = 10_000, 10_000
_DESCRIPTION = """Place a grid of pipelines and stages on workers, neighbours and shadows apart in nodes and zones. The
exit code is 3 if the loss of some node, or of one of several zones, would be fatal."""


def add_parser(subparsers: _SubParsers) -> None:
    """Register ``plan`` with its options; ``args.run(args)`` executes it and returns the exit status."""
    parser = subparsers.add_parser(
        "plan",
        help="show where coordinates and shadows would go, and what losing a zone or a node would cost",
        description=_DESCRIPTION,
    )
    parser.add_argument(
        "--nodes",
        type=file_path,
        required=True,
        metavar="FILE",
        help="workers: CSV headed worker,node,zone, or JSON",
    )
    parser.add_argument("--pipelines", type=int, required=True, metavar="D", help="pipelines")
    parser.add_argument("--stages", type=int, required=True, metavar="P", help="stages of a pipeline")
    parser.add_argument(
        "--current",
        type=file_path,
        metavar="FILE",
        help="the current placement (JSON); without it nothing is placed yet",
    )
    parser.add_argument(
        "--most", type=int, metavar="N", help="the most coordinates a worker may host (default: its fair share)"
    )
    _add_redundancy(parser)
    parser.add_argument(
        "--zero",
        type=int,
        choices=(0, 1),
        default=1,
        help="0: every pipeline holds the state of all stages, as without ZeRO and bf16 (default: 1, it does not)",
    )
    parser.add_argument(
        "--profile",
        type=file_path,
        metavar="FILE",
        help="measured times, in a file that a job with bamboo.profile wrote",
    )
    parser.add_argument(
        "--micro-batches",
        type=int,
        metavar="M",
        help="of an iteration, for its time (default: as --config says, or the job that --profile is of, else 8)",
    )
    _add_memory(parser)
    parser.add_argument("--write", type=file_path, metavar="FILE", help="write the placement as JSON, for --current")
    parser.set_defaults(run=run)


def _add_redundancy(parser: argparse.ArgumentParser) -> None:
    """Options that are settings of the section."""
    modes = [mode for mode in get_args(RedundancyMode) if mode != "auto"]
    mode = RedundancyConfig.model_fields["mode"].default
    parser.add_argument("--mode", choices=modes, default=mode, help=f"redundancy.mode (default: {mode})")
    parser.add_argument(
        "--copies", type=int, choices=(1, 2), default=1, help="redundancy.copies: shadows of each stage (default: 1)"
    )


def _add_memory(parser: argparse.ArgumentParser) -> None:
    """Options for what devices have to hold."""
    parser.add_argument(
        "--config", type=path_text, metavar="FILE", help="DeepSpeed's JSON: with --model, what devices have to hold"
    )
    parser.add_argument("--model", type=filled, metavar="NAME", help="a model of scripts/train.py, for --config")
    parser.add_argument(
        "--device-gib",
        type=positive,
        metavar="GIB",
        help="memory of a device, for --config: what none can hold is not planned",
    )


def run(args: argparse.Namespace) -> int:
    """Print the plan that ``args`` ask for.

    Returns 0; 2 after a message, for impossible values; 3 if the plan does not survive the loss of some node,
    or of one of several zones.
    """
    try:
        grid = _grid(args)
        args.micro_batches, origin = _micro_batches(args)
        current = read_placement(args.current) if args.current is not None else None
        sites = read_sites(args.nodes)
        profile = Profile.even(grid.stages) if args.profile is None else read_profile(args.profile, grid)
        memory = asked_for(args, [site.worker for site in sites])
        decided = partial(_decided, args, grid, sites, profile, current)
        decision = decided(memory)
        if memory is not None and not memory.fits(decision.placement, micro_batches=args.micro_batches):
            found = too_little(lambda wider: decided(wider).placement, memory, micro_batches=args.micro_batches)
            raise ValueError(found)
        if args.write is not None:
            args.write.write_text(json.dumps(decision.placement.to_json()) + "\n", encoding="utf-8")
    except OSError as error:
        print(f"ds_bamboo plan: --write {args.write}: can't be written ({error.strerror}); give another path",
              file=sys.stderr)  # fmt: skip
        return 2
    except ValueError as error:
        print(f"ds_bamboo plan: {error}", file=sys.stderr)
        return 2
    print("\n".join(plan_lines(decision, current=current)))
    if memory is not None:
        rows = list(memory_rows(decision.placement, memory, micro_batches=args.micro_batches))
        print("\n".join(["", *_table(MEMORY_HEADING, rows), "", *MEMORY_LEGEND]))
        print(answer(decision.placement, memory, micro_batches=args.micro_batches))
    _print_times(args, decision, profile, memory, origin)
    fatal = _fatal(decision)
    if fatal:
        text = f"not survived: the loss of {', or of '.join(fatal)} (exit code {_EXIT_FATAL})"
        print("\n".join(["", *wrapped(text, _COLUMNS)]))
    return _EXIT_FATAL if fatal else 0


def _print_times(
    args: argparse.Namespace, decision: Decision | Balanced, profile: Profile, memory: Memory | None, origin: str
) -> None:
    """What each loss costs in time. ``origin``: where the number of micro-batches is from."""
    measured = args.profile is not None

    def later(left: Sequence[WorkerSite], after: Placement) -> Placement | None:
        if args.mode == "off":  # no stage moves for speed there
            return None
        found = balance(
            after.grid,
            left,
            profile=profile,
            micro_batches=args.micro_batches,
            current=after,
            alike=args.zero == 0,
            memory=memory,
            copies=args.copies,
        )
        return (
            found.placement
            if memory is None or memory.fits(found.placement, micro_batches=args.micro_batches)
            else None
        )

    times = list(
        loss_times(
            decision.placement,
            decision.sites,
            profile,
            micro_batches=args.micro_batches,
            measured=measured,
            later=later,
        )
    )
    if times:
        of = wrapped(f"with {args.micro_batches} micro-batches in an iteration ({origin})", _COLUMNS)
        print("\n".join(["", *_table(HEADING, times), "", *legend(measured=measured), *of]))


def _grid(args: argparse.Namespace) -> Grid:
    """The grid that is asked for. Raises ValueError for one that would take hours."""
    grid = Grid(args.pipelines, args.stages)
    count = grid.pipelines * grid.stages  # len() takes no larger ones
    if count > _MOST_COORDINATES:
        raise ValueError(
            f"--pipelines {grid.pipelines} and --stages {grid.stages} are {count} coordinates, and at most "
            f"{_MOST_COORDINATES} can be planned; give fewer"
        )
    return grid


def _micro_batches(args: argparse.Namespace) -> tuple[int, str]:
    """Of an iteration, and where the number is from. Raises ValueError for none, and for very many."""
    count, origin = micro_batches(args)
    if not 1 <= count <= _MOST_MICRO_BATCHES:
        raise ValueError(f"--micro-batches {count}: give a number from 1 to {_MOST_MICRO_BATCHES}")
    return count, origin


def _decided(
    args: argparse.Namespace,
    grid: Grid,
    sites: Sequence[WorkerSite],
    profile: Profile,
    current: Placement | None,
    memory: Memory | None,
) -> Decision | Balanced:
    """The placement, on devices with that much ``memory`` or, without it, with enough."""
    protected, alike = args.mode != "off", args.zero == 0
    if args.copies == 2 and args.mode in ("off", "full"):
        raise ValueError(f"--copies 2 and --mode {args.mode}: a second shadow needs mode lazy, eager or auto")
    if current is not None:
        current = current.with_copies(args.copies)
    if args.most is not None or not (len(sites) < len(grid) or profile.speeds):
        return decide(
            grid, sites, current=current, most=args.most, protected=protected, alike=alike, copies=args.copies
        )
    return balance(
        grid,
        sites,
        profile=profile,
        micro_batches=args.micro_batches,
        current=current,
        protected=protected,
        alike=alike,
        memory=memory,
        copies=args.copies,
    )


def _fatal(decision: Decision | Balanced, *, alone: bool = False) -> list[str]:
    """The nodes and zones whose loss ends the job. A single zone counts if ``alone``: nothing can be elsewhere then."""
    placement, sites = decision.placement, decision.sites
    nodes = [(f"node {name}", sites.of_node(number)) for number, name in enumerate(sites.nodes)]
    zones = [(f"zone {name}", sites.of_zone(number)) for number, name in enumerate(sites.zones)]
    counted = [*nodes, *(zones if alone or len(zones) > 1 else [])]
    return [name for name, lost in counted if loss_cost(placement, lost).fatal]


def plan_lines(decision: Decision | Balanced, *, current: Placement | None = None) -> list[str]:
    """The whole output: the table of coordinates, the standbys, the reasons, and the cost of losses."""
    placement, sites = decision.placement, decision.sites
    zones = ((name, sites.of_zone(number)) for number, name in enumerate(sites.zones))
    nodes = ((name, sites.of_node(number)) for number, name in enumerate(sites.nodes))
    standbys = [worker for worker in sites.workers if worker not in placement.holders]
    beside = ("second shadow", "its node", "its zone") if placement.copies > 1 else ()
    return [
        *_table(("coordinate", "worker", "node", "zone", "shadow", "its node", "its zone", *beside, "state"),
                list(_coordinate_rows(decision, current))),
        "",
        f"standby: {', '.join(standbys) if standbys else 'none'}",
        "",
        *(part for line in decision.reason.splitlines() for part in wrapped(line, _COLUMNS)),
        "",
        *_table(("loss of zone", *_LOSS_COLUMNS), [_loss_row(placement, name, lost) for name, lost in zones]),
        "",
        *_table(("loss of node", *_LOSS_COLUMNS), [_loss_row(placement, name, lost) for name, lost in nodes]),
        "",
        *(_two_at_once(decision) if placement.copies > 1 else ()),
        *_LEGEND,
        *(_LEGEND_FATAL if _fatal(decision, alone=True) else ()),
    ]  # fmt: skip


_LOSS_COLUMNS = ("workers", "taken over", "copied", "shadow lost", "outcome")
_LEGEND = (
    "neighbours: a coordinate and the next stage's in its pipeline (with one stage:",
    "the next pipeline's)",
    "taken over: coordinates that move to the worker with their shadow. copied: to",
    "one with the same stage of another pipeline. shadow lost: coordinates that stay",
    "where they are, unprotected until they have a new shadow",
)
_LEGEND_FATAL = (
    "FATAL: nobody has these coordinates any more; the job ends, and continues from",
    "its last checkpoint when started again",
)


def _coordinate_rows(decision: Decision | Balanced, current: Placement | None) -> Iterator[tuple[str, ...]]:
    sites = decision.sites
    where = {
        worker: (sites.nodes[node], sites.zones[zone])
        for worker, node, zone in zip(sites.workers, sites.node, sites.zone, strict=True)
    }
    before = {} if current is None else current.all_copies()
    for coordinate, copies in decision.placement.all_copies().items():
        beside: list[str] = []
        for number in range(1, decision.placement.copies + 1):
            beside += (copies[number], *where[copies[number]]) if number < len(copies) else ("-", "-", "-")
        state = _state(copies[0], before.get(coordinate, ()))
        yield (str(coordinate), copies[0], *where[copies[0]], *beside, state)


def _state(worker: WorkerId, before: Sequence[WorkerId]) -> str:
    """Where the new owner has the state from, of those who have it now."""
    if not before:
        return "new"
    if before[0] == worker:
        return "stays"
    return f"shadow of {before[0]}'s" if worker in before else f"moves from {before[0]}"


def _two_at_once(decision: Decision | Balanced) -> Iterator[str]:
    """Which losses of two workers, nodes or zones at once are not survived."""
    sites = decision.sites
    domains = {
        "workers": {worker: worker for worker in sites.workers},
        "nodes": {worker: sites.nodes[node] for worker, node in zip(sites.workers, sites.node, strict=True)},
        "zones": {worker: sites.zones[zone] for worker, zone in zip(sites.workers, sites.zone, strict=True)},
    }
    for name, groups in domains.items():
        if len(set(groups.values())) < 3:
            continue
        fatal = sorted(" and ".join(sorted(pair)) for pair in fatal_pairs(decision.placement, groups))
        more = f" and {len(fatal) - _SHOWN_COORDINATES} more" if len(fatal) > _SHOWN_COORDINATES else ""
        outcome = f"FATAL: {', '.join(fatal[:_SHOWN_COORDINATES])}{more}" if fatal else "survived, whichever they are"
        yield f"loss of two {name} at once: {outcome}"
    yield ""


def _loss_row(placement: Placement, name: str, lost: Sequence[WorkerId]) -> tuple[str, ...]:
    cost = loss_cost(placement, lost)
    counts = (len(cost.taken_over), len(cost.copied), len(cost.unprotected))
    return name, str(len(lost)), *map(str, counts), _outcome(cost)


def _outcome(cost: LossCost) -> str:
    if cost.fatal:
        shown = ", ".join(map(str, cost.fatal[:_SHOWN_COORDINATES]))
        more = len(cost.fatal) - _SHOWN_COORDINATES
        return f"FATAL: {shown}" + (f" and {more} more" if more > 0 else "")
    return "survived" if cost.taken_over or cost.copied else "nothing lost"


def _table(heading: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(heading, *rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (heading, *rows)
    ]
