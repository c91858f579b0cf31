"""All workers are killed while their agents live: the job starts anew from the store, and ends with the same bits."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from deepspeed_bamboo.eventlog.files import read_worker_files
from deepspeed_bamboo.testing.fork_server import ForkServer
from deepspeed_bamboo.testing.harness import Machine, Outcome
from tests.runtime.anew_script import AT_THE_ENDS, worker
from tests.runtime.scenarios import Training
from tests.runtime.test_checkpoints import SCHEDULE
from tests.runtime.test_losses import CLIPPED, kill

ONE_BY_FOUR = Training("anew-1x4", 4, steps=8, dropout=0.3, settings={**CLIPPED, **SCHEDULE}, faults=[])
ONE_BY_TWO = replace(ONE_BY_FOUR, name="anew-1x2", stages=2, count=4, steps=5)
TWO_BY_TWO = replace(ONE_BY_FOUR, name="anew-2x2", stages=2)
Undisturbed = Callable[..., dict[str, Any]]
EVERYWHERE = ("idle", "forward", "backward", "reduce", "commit", "step")


def trained(
    server: ForkServer,
    folder: Path,
    training: Training,
    *,
    world: int,
    vanish: Sequence[str] = (),
    memory: bool = False,
    **machine: Any,
) -> tuple[Outcome, list[dict[str, Any]], list[dict[str, Any]]]:
    """How it ended, what its workers have seen, and the events of all. On nodes that ``vanish`` faults take agents."""
    folder.mkdir()
    bamboo = {
        "checkpoint": {
            "dir": str(folder / "kept"),
            "interval_minutes": 1e-9,
            **({"memory_interval_seconds": 1e-9} if memory else {}),
        },
        "event_log": str(folder / "events"),
    }
    argv = [json.dumps(asdict(replace(training, bamboo={**bamboo, **training.bamboo}))), str(folder), *vanish]
    with Machine(server, worker, workers=world, argv=argv, lease_seconds=10.0, **machine) as running:
        outcome = running.wait(within_seconds=90)
    seen = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*.json"))]
    return outcome, seen, [event for events in read_worker_files(folder / "events").values() for event in events]


def check(found: tuple[Outcome, list[dict[str, Any]], list[dict[str, Any]]], whole: dict[str, Any]) -> None:
    """All ended well, in the same state, and each loss that anybody has seen is the undisturbed job's."""
    outcome, seen, events = found
    assert set(outcome.exit_codes.values()) <= {0, -9} and seen, outcome.output
    assert {one["digest"] for one in seen} == {whole["digest"]}, outcome.output
    steps = [event for event in events if event["event"] == "step"]
    assert steps and all(event["loss"] == whole["losses"][str(event["step"])] for event in steps), outcome.output
    assert all(loss == whole["losses"][step] for one in seen for step, loss in one["losses"].items())


@pytest.fixture(scope="module")
def undisturbed(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """What the workers of a job have seen in which nobody is lost; the same one is run once."""
    known: dict[str, dict[str, Any]] = {}

    def run(training: Training, *, world: int) -> dict[str, Any]:
        if training.name not in known:
            folder = tmp_path_factory.mktemp("undisturbed") / "job"
            outcome, seen, _ = trained(fork_server, folder, training, world=world)
            assert set(outcome.exit_codes.values()) == {0} and seen, outcome.output
            known[training.name] = seen[0]
        return known[training.name]

    return run


def check_restored(events: list[dict[str, Any]], *, after: int) -> None:
    """The workers that started anew say from where, and how many steps were done again."""
    restored = [event for event in events if event["event"] == "restored" and not event["workers"]]
    assert restored and all(0 < e["from_step"] <= e["step"] and e["source"] == "store" for e in restored), restored
    assert all(e["step"] >= after and e["redone"] == e["step"] - e["from_step"] for e in restored), restored


def all_of(stages: int, step: int, at: str) -> list[dict[str, Any]]:
    return [kill(step, 0, stage, at, 1 if at in ("forward", "backward") else None) for stage in range(stages)]


def test_both_workers_are_killed_while_their_agents_live(
    fork_server: ForkServer, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    whole = undisturbed(ONE_BY_TWO, world=2)
    killed = replace(ONE_BY_TWO, faults=all_of(2, 3, "forward"))
    found = trained(fork_server, tmp_path / "job", killed, world=2, max_restarts=2)
    check(found, whole)
    assert set(found[0].exit_codes.values()) == {0}
    check_restored(found[2], after=3)
    (run,) = {event.get("run") for event in found[2]}
    assert run and "@20" in run, "one start of the job, one run"


@pytest.mark.sweep
@pytest.mark.parametrize("at", EVERYWHERE)
def test_all_workers_are_killed_while_their_agents_live(
    fork_server: ForkServer, undisturbed: Undisturbed, tmp_path: Path, at: str
) -> None:
    whole = undisturbed(ONE_BY_FOUR, world=4)
    killed = replace(ONE_BY_FOUR, faults=all_of(4, 5, at))
    found = trained(fork_server, tmp_path / "job", killed, world=4, max_restarts=2)
    check(found, whole)
    assert set(found[0].exit_codes.values()) == {0}
    check_restored(found[2], after=5)


@pytest.mark.sweep
@pytest.mark.parametrize("at", EVERYWHERE)
def test_all_workers_are_killed_and_one_node_with_its_agents(
    fork_server: ForkServer, undisturbed: Undisturbed, tmp_path: Path, at: str
) -> None:
    """The first node, of rank 0; etcd is elsewhere. Two workers start anew for four stages."""
    whole = undisturbed(ONE_BY_FOUR, world=4)
    killed = replace(ONE_BY_FOUR, faults=all_of(4, 5, at))
    more: dict[str, Any] = {"nodes": ["n0", "n1", "n0", "n1"], "vanish": ["n0"], "max_restarts": 2}
    found = trained(fork_server, tmp_path / "job", killed, world=4, **more)
    check(found, whole)
    assert found[0].exit_codes == {0: -9, 1: 0, 2: -9, 3: 0}, found[0].output
    assert [one["members"] for one in found[1]] == [2, 2], found[0].output
    check_restored(found[2], after=5)


@pytest.mark.sweep
@pytest.mark.parametrize("at", EVERYWHERE)
def test_a_node_and_that_of_rank_0_are_lost_at_once(
    fork_server: ForkServer, undisturbed: Undisturbed, tmp_path: Path, at: str
) -> None:
    """With their agents; etcd is elsewhere. The third node's worker goes on in its process. No neighbours are on
    one node, so that nothing moves before."""
    whole = undisturbed(ONE_BY_FOUR, world=4)
    killed = replace(ONE_BY_FOUR, faults=[fault for fault in all_of(4, 5, at) if fault["stage"] != 2])
    more: dict[str, Any] = {"nodes": ["n0", "n1", "n2", "n1"], "vanish": ["n0", "n1"]}
    found = trained(fork_server, tmp_path / "job", killed, world=4, **more)
    check(found, whole)
    assert found[0].exit_codes == {0: -9, 1: -9, 2: 0, 3: -9}, found[0].output
    assert [one["members"] for one in found[1]] == [1]


@pytest.mark.sweep
@pytest.mark.parametrize("mode", ["off", "lazy"])
def test_two_pipelines_start_anew_on_two_workers(
    fork_server: ForkServer, undisturbed: Undisturbed, tmp_path: Path, mode: str
) -> None:
    training = replace(TWO_BY_TWO, name=f"anew-2x2-{mode}", bamboo={"redundancy": {"mode": mode}})
    whole = undisturbed(training, world=4)
    faults = [kill(5, pipeline, stage, "backward", 1) for pipeline in (0, 1) for stage in (0, 1)]
    more: dict[str, Any] = {"nodes": ["n0", "n1", "n0", "n1"], "vanish": ["n0"], "max_restarts": 2}
    found = trained(fork_server, tmp_path / "job", replace(training, faults=faults), world=4, **more)
    check(found, whole)
    assert [one["members"] for one in found[1]] == [2, 2], found[0].output
    check_restored(found[2], after=5)


@pytest.mark.sweep
def test_without_redundancy_one_loss_has_all_start_anew(
    fork_server: ForkServer, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    training = replace(ONE_BY_TWO, name="anew-off-1x2", bamboo={"redundancy": {"mode": "off"}})
    whole = undisturbed(training, world=2)
    killed = replace(training, faults=[kill(3, 0, 1, "backward", 1)])
    found = trained(fork_server, tmp_path / "job", killed, world=2, max_restarts=1)
    check(found, whole)
    assert found[0].exit_codes == {0: 0, 1: 0} and [one["members"] for one in found[1]] == [2, 2]
    check_restored(found[2], after=3)


ENDS = replace(ONE_BY_FOUR, name=f"{AT_THE_ENDS}-1x4", steps=9)
LOST = {
    "at once": [kill(5, 0, stage, "forward", 1) for stage in (0, 3)],
    "one by one": [kill(3, 0, 3, "forward", 1), kill(6, 0, 0, "backward", 1)],
}


@pytest.mark.sweep
@pytest.mark.parametrize("how", LOST)
@pytest.mark.parametrize("memory", [False, True])
def test_all_start_anew_once_nobody_has_data(
    fork_server: ForkServer, undisturbed: Undisturbed, tmp_path: Path, how: str, memory: bool
) -> None:
    """First and last stages alone have iterators; those who are left have all stages, and nothing to train with."""
    whole = undisturbed(ENDS, world=4)
    killed = replace(ENDS, faults=LOST[how])
    found = trained(fork_server, tmp_path / "job", killed, world=4, memory=memory, max_restarts=2)
    check(found, whole)
    assert set(found[0].exit_codes.values()) == {0}
    check_restored(found[2], after=5)
