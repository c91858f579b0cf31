"""The quick cases of the fault sweep with real jobs: agents, workers, etcd, gloo; one worker dies, nothing changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deepspeed_bamboo.eventlog.summary import RunSummary
from deepspeed_bamboo.sweep.cases import Case, select
from deepspeed_bamboo.sweep.forked import ForkedJobs
from deepspeed_bamboo.sweep.setups import STEPS, Setup
from deepspeed_bamboo.sweep.sweep import Sweep
from deepspeed_bamboo.testing.fork_server import ForkServer

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def sweep(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sweep]:
    with ForkedJobs(server=fork_server) as job:
        yield Sweep(root=ROOT, folder=tmp_path_factory.mktemp("sweep"), job=job)


@pytest.fixture(scope="module")
def references(sweep: Sweep) -> Callable[[Setup], RunSummary]:
    return sweep.reference_once


def test_the_undisturbed_run_is_complete(references: Callable[[Setup], RunSummary]) -> None:
    for setup in {case.setup for case in select("quick")}:
        reference = references(setup)
        assert (reference.final_step, len(reference.losses), reference.failovers) == (STEPS, STEPS, ())
        assert len(reference.digest or "") == 64


# A worker that dies, one that stops, and one that dies where all wait for each other; each kind of instruction is tried
# without agents in tests/runtime/test_losses.py.
SOME = ("M4/KILL-0.1-backward2-step5", "M4/KILL-0.3-reduce-step5", "M4/STOP-0.0-forward1-step5")


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=() if case.name in SOME else pytest.mark.sweep)
        for case in select("quick")
    ],
)
def test_a_lost_worker_changes_nothing(case: Case, sweep: Sweep, references: Callable[[Setup], RunSummary]) -> None:
    row = sweep.row(case, reference=references(case.setup))
    assert row.problems == ()
    assert len(row.failovers) == 1
    assert [str(fault.coordinate) for fault in case.faults.faults] == list(row.failovers[0].lost)


@pytest.mark.parametrize("case", select("selection"), ids=lambda case: case.name)
def test_a_second_loss_during_recovery_changes_nothing(
    case: Case, sweep: Sweep, references: Callable[[Setup], RunSummary]
) -> None:
    """Of the covering setups, so with other modes, grids, precisions and models; the rest is in the full profile."""
    row = sweep.row(case, reference=references(case.setup))
    assert row.problems == ()
    assert row.failovers
