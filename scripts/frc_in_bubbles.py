"""Where redundant forwards (FRC) ran on the device, from traces of bench_gpu.py --trace, and how idle it was around.

    python scripts/bench_gpu.py --stages 2 --variants stock,eager-none --trace runs/traces
    python scripts/frc_in_bubbles.py runs/traces/eager-none-rank*.json --picture runs/frc.png

A redundant forward that is followed by idle time has delayed nothing: what this worker waited for came later.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Span = tuple[float, float]

# Kernels closer to each other than this belong together: launching takes the host as long, now and then.
_TOGETHER_MILLISECONDS = 0.3


@dataclass(frozen=True)
class Redundant:
    """One redundant forward: its name, when it ran, and the idle time before and after. All in milliseconds."""

    name: str
    begin: float
    length: float
    idle_before: float
    idle_after: float


@dataclass(frozen=True)
class Timeline:
    """What one worker's device did: its own work in pieces, and the redundant forwards."""

    own: tuple[Span, ...]
    redundant: tuple[Redundant, ...]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table. Returns 1 when no trace has a redundant forward."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", type=Path, help="of one run, a worker each (.json or .json.gz)")
    parser.add_argument("--picture", type=Path, help="draw it too (needs matplotlib, the plot extra)")
    arguments = parser.parse_args(argv)
    lines = {path.name: timeline(events_of(path)) for path in arguments.traces}
    start = min((line.own[0][0] for line in lines.values() if line.own), default=0.0)
    for name, line in lines.items():
        for forward in line.redundant:
            print(
                f"{name}: {forward.name} at {forward.begin - start:.1f} ms for {forward.length:.1f} ms, device idle "
                f"{forward.idle_before:.1f} ms before and {forward.idle_after:.1f} ms after"
            )
    if arguments.picture is not None:
        draw(lines, arguments.picture, start=start)
    return 0 if any(line.redundant for line in lines.values()) else 1


def events_of(path: Path) -> list[dict[str, Any]]:
    """The events of a Chrome trace."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return events


def timeline(events: Sequence[dict[str, Any]]) -> Timeline:
    """From the events of one worker: kernels on the stream that computes, apart by the FRC that launched them.

    The first and last redundant forward of a trace are left out where nothing was recorded before or after them.
    """
    launched = [e for e in events if e.get("cat") == "gpu_user_annotation" and e["name"].startswith("FRC")]
    kernels = [e for e in events if e.get("cat") in ("kernel", "gpu_memset") and not e["name"].startswith("nccl")]
    if not kernels:
        return Timeline((), ())
    stream = Counter(e["args"].get("stream") for e in kernels).most_common(1)[0][0]
    spans = sorted((_span(e) for e in kernels if e["args"].get("stream") == stream), key=lambda span: span[0])
    forwards = sorted((_span(e), str(e["name"])) for e in launched)
    own = _together([span for span in spans if not any(a <= span[0] < b for (a, b), _ in forwards)])
    redundant = []
    for (begin, end), name in forwards:
        its = [span for span in spans if begin <= span[0] < end]
        before = [b for _, b in own if its and b <= its[0][1]]
        after = [a for a, _ in own if its and a >= its[-1][0]]
        if before and after:
            start, stop = its[0][0], its[-1][1]
            redundant.append(Redundant(name, start, stop - start, start - before[-1], after[0] - stop))
    return Timeline(tuple(own), tuple(redundant))


def _span(event: dict[str, Any]) -> Span:
    begin = float(event["ts"]) / 1000
    return begin, begin + float(event["dur"]) / 1000


def _together(spans: Sequence[Span]) -> list[Span]:
    joined: list[Span] = []
    for begin, end in spans:
        if joined and begin - joined[-1][1] < _TOGETHER_MILLISECONDS:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((begin, end))
    return joined


def draw(lines: dict[str, Timeline], path: Path, *, start: float) -> None:
    """A bar for each worker: its own work, and redundant forwards in another colour."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as pyplot

    figure, axes = pyplot.subplots(figsize=(12, 1 + 0.6 * len(lines)))
    for row, line in enumerate(lines.values()):
        own = [(a - start, b - a) for a, b in line.own]
        redundant = [(f.begin - start, f.length) for f in line.redundant]
        axes.broken_barh(own, (row - 0.4, 0.8), facecolors="tab:blue")
        axes.broken_barh(redundant, (row - 0.4, 0.8), facecolors="tab:orange")
    axes.set_yticks(range(len(lines)), list(lines))
    axes.set_xlabel("ms (orange: redundant forwards)")
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    sys.exit(main())
