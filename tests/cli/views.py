"""Jobs as ``ds_bamboo status`` reads them, for tests of what it shows."""

from __future__ import annotations

from typing import Any

from deepspeed_bamboo.cli.job_view import JobView, WorkerView, failovers, last_checkpoint
from deepspeed_bamboo.coordination import Drain
from deepspeed_bamboo.core.grid import Grid
from deepspeed_bamboo.core.placement import Placement
from deepspeed_bamboo.long_work import WorkFacts

NOW = 1_000_000.0


def view_of(
    workers: list[str],
    *,
    grid: Grid,
    states: dict[str, str] | None = None,
    node: str = "ip-10-0-{}-17",
    zone: str = "us-east-1a",
    standbys: int = 0,
    copies: int = 1,
    events: list[dict[str, Any]] | None = None,
    progress: dict[str, Any] | None = None,
    **fields: Any,
) -> JobView:
    """A job of ``workers``, the last ``standbys`` of which host nothing."""
    placement = Placement.initial(grid, workers[: len(workers) - standbys], copies=copies)
    views = tuple(
        WorkerView(
            worker=worker,
            node=node.format(number // 4),
            zone=zone,
            state=(states or {}).get(worker, "standby" if number >= len(workers) - standbys else "active"),
            hosts=tuple(map(str, placement.hosted_by(worker))),
            shadows=tuple(map(str, placement.shadowed_by(worker))),
            address=f"10.0.{number // 4}.17",
            pid=20_000 + number,
            agent_pid=10_000 + number,
        )
        for number, worker in enumerate(workers)
    )
    happened = events or []
    told = {"worker": workers[0], "t": NOW - 3, "events": happened, **(progress or {"step": 0, "loss": 9.0})}
    known: dict[str, Any] = {
        "job": "gpt",
        "state": "running",
        "detail": "",
        "epoch": 3,
        "reason": "lost w2",
        "age_seconds": 3840.0,
        "epoch_seconds": 125.0,
        "agents": len(workers),
        "draining": (),
        "grid": (grid.pipelines, grid.stages),
        "progress": told,
        "progress_seconds": 3.0,
        "seen_t": NOW,
        "failovers": failovers(happened, now=NOW),
        "checkpoint": last_checkpoint(happened, now=NOW),
    }
    return JobView(workers=views, **{**known, **fields})


LOSS = {"t": NOW - 125, "event": "loss_of_node", "step": 398, "workers": ["ip-10-0-0-17-2-0"], "lost": ["0.2"]}
EVENTS: list[dict[str, Any]] = [
    {"t": NOW - 3700, "event": "mode", "step": 20, "reason": "eager: saves 0.12 s a loss", "mode": "eager"},
    {"t": NOW - 1300, "event": "checkpoint", "action": "saved", "step": 300, "path": "s3://b/p/bamboo_step300"}
    | {"interval_seconds": 600.0},
    {**LOSS, "pause_seconds": {"total": 0.21}},
    {"t": NOW - 60, "event": "reconfigured", "step": 405, "reason": "joined: ip-10-0-1-17-5-0", "seconds": 0.53},
]
STEP = {"step": 412, "loss": 2.2513, "seconds": 0.125, "mode": "eager"}
SIX = [f"ip-10-0-{number // 4}-17-{number}-0" for number in range(6)]

STACK = '  File "/srv/train.py", line 7 in augment\n  File "/srv/train.py", line 31 in <module>'
HANG = {"rank": 1, "node": "ip-10-0-0-17", "doing": "FNC 0.1 2", "step": 412, "seconds": 64.2, "waiting": False}

VIEWS: dict[str, JobView] = {
    # Five workers in two nodes, one standing by, one slow, one stuck, a node that is drained.
    "troubles": view_of(
        SIX,
        grid=Grid(1, 5),
        standbys=1,
        states={SIX[3]: "silent", SIX[4]: "leaving"},
        events=EVENTS,
        progress={**STEP, "slow": {SIX[2]: 0.5}},
        hangs={SIX[1]: {**HANG, "stack": STACK}},
        works={SIX[5]: WorkFacts("state of 0.3 from worker " + SIX[2], 850_000_000, 3_400_000_000, "bytes", 4.0)},
        draining=(Drain("ip-10-0-1-17", 90.0, "AWS takes the machine", NOW),),
    ),
    "published_grid": view_of(
        [f"n{number}-0" for number in range(48)],
        grid=Grid(4, 12),
        events=EVENTS,
        progress=STEP,
        node="n{}",
    ),
    "wide_unicode": view_of(
        [f"節点-{number}" for number in range(4)], grid=Grid(2, 2), node="計算機{}号", zone="東京-é", progress=STEP
    ),
    "dead": view_of(
        ["w0", "w1"],
        grid=Grid(1, 2),
        states={"w0": "silent", "w1": "silent"},
        progress=STEP,
        state="dead",
        detail="nobody runs it any more",
        agents=0,
    ),
    "starting": JobView(
        job="gpt",
        state="starting",
        detail="",
        epoch=None,
        reason="",
        age_seconds=12.0,
        epoch_seconds=None,
        agents=2,
        workers=tuple(
            WorkerView(f"(slot {rank})", "a", "?", "preparing", (), (), agent_pid=100 + rank) for rank in (0, 1)
        ),
        draining=(),
        slots=4,
        missing_slots=(2, 3),
    ),
}
