"""Agents and workers of one machine as real processes: what happens when some of them die, in every way."""

from __future__ import annotations

import itertools
import math
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from deepspeed_bamboo.coordination import EpochRecord
from deepspeed_bamboo.coordination.server import PrivateEtcd
from deepspeed_bamboo.elastic.processes import ProcessIdentity
from deepspeed_bamboo.testing.fork_server import ForkRequest, ForkServer, reference
from deepspeed_bamboo.testing.harness import Machine, Outcome
from tests.coordination.helpers import alive, freeze, pause_after, stretched, wait_until
from tests.coordination.manual_etcd import ManualEtcd
from tests.elastic import interrupted_agent, workers


@pytest.fixture(scope="module")
def etcd(temporary_folder: Path) -> Iterator[list[str]]:
    """The endpoints of one server for all jobs but those whose subject it is: they have each their own."""
    with PrivateEtcd() as server:
        yield [str(server.endpoint)]


def epoch_of(machine: Machine, number: int) -> EpochRecord:
    """The job's epoch once it is at least ``number``."""
    start = time.monotonic()
    deadline = start + 60
    while (epoch := machine.coordinator.epoch()) is None or epoch.number < number:
        printed = machine.wait(within_seconds=0).output if time.monotonic() > deadline else ""
        assert time.monotonic() < deadline, f"no epoch {number} but {epoch}; the workers printed\n{printed}"
        pause_after(start)
    return epoch


def finish(machine: Machine) -> Outcome:
    machine.coordinator.finish({"by": "the test"})
    return machine.wait(within_seconds=60)


def ranks(epoch: EpochRecord) -> list[int]:
    return [int(worker.split("-")[-2]) for worker in epoch.members]


def short_lease() -> int:
    """The shortest lease that live processes can keep on this machine at this moment."""
    return math.ceil(stretched(1))


def leased(seconds: float) -> dict[str, Any]:
    """Arguments of a Machine whose agents and workers have leases of so many seconds."""
    return {"lease_seconds": seconds, "environment": {"TEST_LEASE_SECONDS": str(seconds)}}


ALL_WELL = {0: 0, 1: 0, 2: 0, 3: 0}


def test_workers_see_who_they_are(fork_server: ForkServer, etcd: list[str]) -> None:
    with Machine(
        fork_server, workers.print_environment, endpoints=etcd, workers=2, environment={"BAMBOO_ZONE": "ignored"}
    ) as machine:
        outcome = machine.wait(within_seconds=60)
        assert outcome.exit_codes == {0: 0, 1: 0}, outcome.output
        for rank in (0, 1):
            seen = dict(line.split("=", 1) for line in outcome.outputs[rank].split())
            assert seen["RANK"] == seen["LOCAL_RANK"] == str(rank)
            assert seen["WORLD_SIZE"] == "2" and seen["MASTER_PORT"] != "29500"
            assert seen["BAMBOO_WORKER"].endswith(f"-{rank}-0") and seen["BAMBOO_GENERATION"] == "0"
            assert seen["BAMBOO_ENDPOINTS"] == ",".join(machine.endpoints)
            assert seen["BAMBOO_AGENT_PID"] == str(machine.agent_pids[rank])
            assert seen["BAMBOO_ZONE"] == "unknown"


def test_four_agents_and_workers_start_and_end_within_two_seconds(fork_server: ForkServer, etcd: list[str]) -> None:
    start = time.monotonic()
    with Machine(fork_server, workers.trivial, endpoints=etcd, argv=["there"]) as machine:
        outcome = machine.wait(within_seconds=60)
    assert outcome.exit_codes == ALL_WELL, outcome.output
    assert all(text.strip() == "hello there" for text in outcome.outputs.values()), outcome.output
    assert time.monotonic() - start < stretched(2)


@pytest.mark.parametrize("rank", [0, pytest.param(3, marks=pytest.mark.sweep)])
def test_a_killed_worker_is_lost_at_once_and_its_agent_stays(
    fork_server: ForkServer, etcd: list[str], rank: int
) -> None:
    with Machine(fork_server, workers.train, endpoints=etcd, **leased(20)) as machine:
        epoch_of(machine, 0)
        killed = machine.kill_worker(rank)
        epoch = epoch_of(machine, 1)
        assert ranks(epoch) == [other for other in range(4) if other != rank]
        assert epoch.proposer == f"agent of rank {rank}" and "killed by SIGKILL" in epoch.reason
        wait_until(lambda: len(machine.coordinator.progress(1)) == 3, what="all survivors' reports")
        seconds = [report["seen"] - killed for report in machine.coordinator.progress(1).values()]
        # By the agent, not by a lease of 20 s; what it takes (0.02 s) the fault sweep measures, a loaded machine can't.
        assert max(seconds) < stretched(1), f"survivors heard of it after {seconds}"
        wait_until(lambda: len(machine.coordinator.members()) == 3, what="the lost one's key to go")
        assert len(machine.coordinator.agents()) == 4
        outcome = finish(machine)
    assert outcome.exit_codes == ALL_WELL, outcome.output
    assert re.search(rf"\[bamboo \d\d:\d\d:\d\d rank {rank}\] lost ", outcome.outputs[rank])


def test_a_stopped_worker_is_lost_with_its_lease_and_killed_by_its_agent(
    fork_server: ForkServer, etcd: list[str]
) -> None:
    lease = short_lease()  # it may be long on loaded cores
    with Machine(fork_server, workers.train, endpoints=etcd, **leased(lease)) as machine:
        epoch_of(machine, 0)
        pid = machine.worker_pid(2)
        stopped = machine.kill_worker(2, signal.SIGSTOP)
        epoch = epoch_of(machine, 1)
        assert 0.5 < time.monotonic() - stopped < lease + stretched(2)
        assert ranks(epoch) == [0, 1, 3] and "no sign of life" in epoch.reason
        wait_until(lambda: not alive(pid), what="the stopped worker's end")
        outcome = finish(machine)
    assert outcome.exit_codes == ALL_WELL, outcome.output


def test_a_stopped_agent_alone_loses_nobody(fork_server: ForkServer, etcd: list[str]) -> None:
    """Its worker looks after its own key meanwhile."""
    with Machine(fork_server, workers.train, endpoints=etcd, **leased(short_lease())) as machine:
        epoch_of(machine, 0)
        freeze(machine.agent_pids[2])
        wait_until(lambda: 2 not in machine.coordinator.agents(), within_seconds=60, what="the agent's silence")
        time.sleep(2 * short_lease())  # there is no event to wait for: nothing must happen
        assert epoch_of(machine, 0).number == 0 and len(machine.coordinator.members()) == 4
        machine.signal_agent(2, signal.SIGCONT)
        outcome = finish(machine)
    assert outcome.exit_codes == ALL_WELL, outcome.output


def test_a_worker_stopped_with_its_agent_is_lost_with_its_lease(fork_server: ForkServer, etcd: list[str]) -> None:
    lease = short_lease()  # it may be long on loaded cores
    with Machine(fork_server, workers.train, endpoints=etcd, **leased(lease)) as machine:
        epoch_of(machine, 0)
        pid = machine.worker_pid(2)
        freeze(machine.agent_pids[2])
        stopped = machine.kill_worker(2, signal.SIGSTOP)
        epoch = epoch_of(machine, 1)
        assert 0.5 < time.monotonic() - stopped < lease + stretched(2)
        assert ranks(epoch) == [0, 1, 3] and "no sign of life" in epoch.reason
        machine.signal_agent(2, signal.SIGCONT)
        wait_until(lambda: not alive(pid), within_seconds=60, what="the stopped worker's end")
        outcome = finish(machine)
    assert outcome.exit_codes == ALL_WELL, outcome.output


@pytest.fixture(scope="module")
def holding_the_gil(fork_server: ForkServer, etcd: list[str]) -> Iterator[dict[str, Machine]]:
    """Both jobs, by who holds the GIL, at the same time: nearly all that they do is sleep."""
    lease = short_lease()
    with ExitStack() as machines:
        running = {}
        for holders in ("all", "2"):
            arguments = [str(3 * lease), holders]
            machine = Machine(fork_server, workers.hold_the_gil, endpoints=etcd, argv=arguments, **leased(lease))
            running[holders] = machines.enter_context(machine)
        for machine in running.values():
            for rank in range(4):
                machine.worker_pid(rank)  # before a test looks at what it starts itself
        yield running


@pytest.mark.parametrize("holders", ["all", "2"])
def test_a_worker_that_holds_the_gil_for_three_leases_is_not_lost(
    holding_the_gil: dict[str, Machine], holders: str
) -> None:
    outcome = holding_the_gil[holders].wait(within_seconds=120)
    assert outcome.output.count("held the GIL") == (8 if holders == "all" else 2), outcome.output
    assert outcome.exit_codes == ALL_WELL, outcome.output
    assert "lost" not in outcome.output, outcome.output


def test_two_losses_in_a_row(fork_server: ForkServer, etcd: list[str]) -> None:
    with Machine(fork_server, workers.train, endpoints=etcd) as machine:
        epoch_of(machine, 0)
        machine.kill_worker(0)
        epoch_of(machine, 1)
        machine.kill_worker(2)
        assert ranks(epoch_of(machine, 2)) == [1, 3]
        outcome = finish(machine)
    assert outcome.exit_codes == ALL_WELL, outcome.output


def test_two_losses_at_once(fork_server: ForkServer, etcd: list[str]) -> None:
    with Machine(fork_server, workers.train, endpoints=etcd) as machine:
        epoch_of(machine, 0)
        machine.worker_pid(1)
        machine.kill_worker(1)
        machine.kill_worker(3)
        assert ranks(epoch_of(machine, 2)) == [0, 2]
        outcome = finish(machine)
    assert outcome.exit_codes == ALL_WELL, outcome.output


def test_a_fatal_loss_ends_the_job_and_names_what_is_lost(fork_server: ForkServer, etcd: list[str]) -> None:
    with Machine(fork_server, workers.train, endpoints=etcd) as machine:
        epoch_of(machine, 0)
        start = machine.kill_worker(1)
        machine.kill_worker(2)
        outcome = machine.wait(within_seconds=60)
        assert time.monotonic() - start < stretched(10)
    assert outcome.exit_codes == {0: 75, 1: 75, 2: 75, 3: 75}, outcome.output
    lines = re.findall(r"\[bamboo [0-9:]{8} rank 0\] the job ends: (.*)", outcome.output)
    assert len(lines) == 1 and "0.2" in lines[0] and "checkpoint" in lines[0]


def test_an_exception_ends_all_with_its_traceback_once(fork_server: ForkServer, etcd: list[str]) -> None:
    with Machine(fork_server, workers.raise_on_rank_2, endpoints=etcd) as machine:
        outcome = machine.wait(within_seconds=60)
    assert outcome.exit_codes == {0: 1, 1: 1, 2: 1, 3: 1}, outcome.output
    assert outcome.seconds < stretched(10)
    assert outcome.output.count("Traceback") == 1
    text = outcome.outputs[2]
    assert "(rank 2)" in text and "ValueError: the user's mistake" in text and "in raise_on_rank_2" in text
    assert "bootstrap" not in text and "runpy" not in text, "only the user's frames are shown"


def test_a_failed_worker_that_hangs_at_its_exit_does_not_hold_up_the_end(
    fork_server: ForkServer, etcd: list[str]
) -> None:
    with Machine(fork_server, workers.raise_and_hang_at_exit, endpoints=etcd) as machine:
        outcome = machine.wait(within_seconds=60)
    assert set(outcome.exit_codes.values()) == {1}, outcome.output
    assert outcome.seconds < stretched(10)
    assert "RuntimeError: an exit handler will hang" in outcome.outputs[1]


def test_an_exit_code_without_a_traceback_is_an_error_of_the_script(fork_server: ForkServer, etcd: list[str]) -> None:
    with Machine(fork_server, workers.leave_with_code_7_on_rank_1, endpoints=etcd) as machine:
        outcome = machine.wait(within_seconds=60)
    assert set(outcome.exit_codes.values()) == {1}, outcome.output
    assert "ended with exit code 7" in outcome.outputs[1]


def test_a_script_that_ends_while_others_need_it_is_named(fork_server: ForkServer, etcd: list[str]) -> None:
    with Machine(fork_server, workers.leave_early_on_rank_1, endpoints=etcd) as machine:
        outcome = machine.wait(within_seconds=60)
    assert set(outcome.exit_codes.values()) == {1}, outcome.output
    assert "same number of steps" in outcome.output and "Traceback" not in outcome.output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_one_agent_ends_all(fork_server: ForkServer, etcd: list[str], number: signal.Signals) -> None:
    with Machine(fork_server, workers.train, endpoints=etcd) as machine:
        epoch_of(machine, 0)
        start = time.monotonic()
        machine.signal_agent(2, number)
        outcome = machine.wait(within_seconds=60)
        assert time.monotonic() - start < stretched(3)
    assert outcome.exit_codes == {0: 1, 1: 1, 2: 128 + number, 3: 1}, outcome.output
    assert f"{number.name} was sent to the agent of rank 2" in outcome.outputs[2]
    assert "lost" not in outcome.output, "an interruption is no loss"


def test_a_worker_that_ignores_sigterm_is_killed_in_time(fork_server: ForkServer, etcd: list[str]) -> None:
    with Machine(fork_server, workers.train_ignoring_sigterm, endpoints=etcd) as machine:
        epoch_of(machine, 0)
        start = time.monotonic()
        machine.signal_agent(0, signal.SIGTERM)
        outcome = machine.wait(within_seconds=60)
        assert time.monotonic() - start < stretched(8)
    assert None not in outcome.exit_codes.values() and 0 not in outcome.exit_codes.values(), outcome.output


def test_a_signal_to_the_worker_alone_is_a_loss(fork_server: ForkServer, etcd: list[str]) -> None:
    with Machine(fork_server, workers.train, endpoints=etcd) as machine:
        epoch_of(machine, 0)
        machine.kill_worker(1, signal.SIGTERM)
        epoch = epoch_of(machine, 1)
        assert ranks(epoch) == [0, 2, 3] and "SIGTERM" in epoch.reason
        outcome = finish(machine)
    assert outcome.exit_codes == ALL_WELL, outcome.output


def test_a_signal_to_worker_and_agent_is_no_loss(fork_server: ForkServer, etcd: list[str]) -> None:
    """As when a launcher ends the tree of a slot: children first."""
    with Machine(fork_server, workers.train, endpoints=etcd) as machine:
        epoch_of(machine, 0)
        machine.kill_worker(1, signal.SIGTERM)
        time.sleep(0.05)
        machine.signal_agent(1, signal.SIGTERM)
        outcome = machine.wait(within_seconds=60)
    assert 0 not in outcome.exit_codes.values(), outcome.output
    assert "lost" not in outcome.output


def test_a_worker_dies_with_its_agent_and_is_missed(fork_server: ForkServer, etcd: list[str]) -> None:
    with Machine(fork_server, workers.train, endpoints=etcd, **leased(short_lease())) as machine:
        epoch_of(machine, 0)
        pid = machine.worker_pid(1)
        machine.signal_agent(1, signal.SIGKILL)
        wait_until(lambda: not alive(pid), within_seconds=stretched(1), what="the orphan's end")
        assert ranks(epoch_of(machine, 1)) == [0, 2, 3]
        outcome = finish(machine)
    assert outcome.exit_codes == {0: 0, 1: -9, 2: 0, 3: 0}, outcome.output


def test_a_suspicion_makes_a_vanished_process_known_before_its_lease_runs_out(
    fork_server: ForkServer, etcd: list[str]
) -> None:
    with Machine(fork_server, workers.suspect_rank_1, endpoints=etcd, **leased(20)) as machine:
        epoch_of(machine, 0)
        start = time.monotonic()
        machine.signal_agent(1, signal.SIGKILL)
        epoch = epoch_of(machine, 1)
        assert time.monotonic() - start < stretched(2)
        assert ranks(epoch) == [0, 2, 3] and "its process is gone, its machine answers" in epoch.reason
        outcome = finish(machine)
    assert outcome.exit_codes == {0: 0, 1: -9, 2: 0, 3: 0}, outcome.output


@pytest.mark.parametrize("code", [0, 4, pytest.param(7, marks=pytest.mark.sweep)])
def test_a_process_that_ends_itself_is_judged_by_its_own_agent_whoever_notices_first(
    fork_server: ForkServer, etcd: list[str], code: int
) -> None:
    """The others suspect it at once, and its agent is held up; that does not make a loss of a script's end."""
    apart = {
        "nodes": ("a", "b", "c", "d"),
        "expulsion_seconds": 2.0,
        **leased(20),
    }  # nobody keeps its key while its agent is held up
    with Machine(fork_server, workers.suspect_rank_1, endpoints=etcd, argv=[str(code)], **apart) as machine:
        pid, agent = machine.worker_pid(1), machine.agent_pids[1]
        freeze(agent)
        epoch_of(machine, 0)
        wait_until(lambda: not alive(pid), within_seconds=60, what="its end")
        time.sleep(0.5)  # for the others to find out, and to do nothing about it
        assert epoch_of(machine, 0).number == 0
        os.kill(agent, signal.SIGCONT)
        outcome = machine.wait(within_seconds=60)
    assert set(outcome.exit_codes.values()) == {1}, outcome.output
    assert "lost" not in outcome.output, outcome.output


def test_a_suspicion_alone_expels_nobody(fork_server: ForkServer, etcd: list[str]) -> None:
    with Machine(fork_server, workers.suspect_a_live_worker, endpoints=etcd) as machine:
        epoch_of(machine, 0)
        time.sleep(1)  # there is no event to wait for: nothing must happen
        assert epoch_of(machine, 0).number == 0
        outcome = finish(machine)
    assert outcome.exit_codes == ALL_WELL, outcome.output


def test_what_a_killed_worker_leaves_is_removed(fork_server: ForkServer, etcd: list[str]) -> None:
    with Machine(fork_server, workers.train_with_children, endpoints=etcd) as machine:
        epoch_of(machine, 0)
        pid = machine.worker_pid(2)
        before = [ProcessIdentity.of(child) for child in _session(pid) if child != pid]
        assert before and os.path.exists(f"/dev/shm/torch_{pid}_1_0")  # noqa: PTH110
        machine.kill_worker(2)
        epoch_of(machine, 1)
        wait_until(lambda: not _session(pid), what="its children to be gone")
        wait_until(lambda: not os.path.exists(f"/dev/shm/torch_{pid}_1_0"), what="its file to be gone")  # noqa: PTH110
        machine.signal_agent(0, signal.SIGTERM)
        outcome = machine.wait(within_seconds=60)
        for rank in range(4):  # who was killed a moment ago may still be on its way out
            pid = machine.worker_pid(rank)
            wait_until(lambda pid=pid: not _session(pid), what=f"rank {rank}'s processes to be gone: {outcome.output}")
            assert not os.path.exists(f"/dev/shm/torch_{pid}_1_0")  # noqa: PTH110


def _session(pid: int) -> list[int]:
    from deepspeed_bamboo.elastic.leftovers import processes_of_session

    return processes_of_session(pid)


def test_a_death_before_the_first_epoch_starts_all_again(fork_server: ForkServer, etcd: list[str]) -> None:
    with Machine(fork_server, workers.die_before_the_first_epoch, endpoints=etcd, argv=["2"]) as machine:
        epoch = epoch_of(machine, 0)
        assert ranks(epoch) == [0, 1, 2, 3]
        assert all(worker.endswith("-2") for worker in epoch.members), "the third attempt succeeded"
        outcome = finish(machine)
    assert outcome.exit_codes == ALL_WELL, outcome.output
    assert "hung up" not in outcome.output, "consequences of the death are not reported as errors"
    told = re.findall(
        r"lost \S+ before training began \((.*)\); all workers start again, attempt (\d) of 4", outcome.output
    )
    assert told == [("its process was killed by SIGKILL", "2"), ("its process was killed by SIGKILL", "3")]


def test_deaths_at_every_start_end_the_job(fork_server: ForkServer, etcd: list[str]) -> None:
    with Machine(fork_server, workers.die_before_the_first_epoch, endpoints=etcd, argv=["99"]) as machine:
        outcome = machine.wait(within_seconds=60)
    assert outcome.exit_codes == {0: 1, 1: 1, 2: 1, 3: 1}, outcome.output
    assert "was lost before training began" in outcome.outputs[0] and "killed by SIGKILL" in outcome.outputs[0]


def test_slots_lost_before_training_begins_end_the_job_and_are_named_once_a_machine(
    fork_server: ForkServer, etcd: list[str]
) -> None:
    nodes, lease = ("vm-0", "vm-0", "vm-1", "vm-1"), short_lease()
    with Machine(fork_server, workers.prepare_for_ever, endpoints=etcd, nodes=nodes, **leased(lease)) as machine:
        wait_until(lambda: len(machine.coordinator.agents()) == 4, what="all agents")
        for rank in range(4):
            machine.worker_pid(rank)
        machine.signal_agent(2, signal.SIGKILL)
        machine.signal_agent(3, signal.SIGKILL)
        start = time.monotonic()
        outcome = machine.wait(within_seconds=60)
        assert time.monotonic() - start < lease + stretched(4)
    assert outcome.exit_codes == {0: 75, 1: 75, 2: -9, 3: -9}, outcome.output
    assert outcome.output.count("the job ends: ") == 1, outcome.output
    assert "lost slots 2, 3 on vm-1 before training began" in outcome.outputs[0]


def test_an_outage_while_the_job_starts_loses_no_slot(fork_server: ForkServer) -> None:
    with Machine(fork_server, workers.prepare_for_ever, workers=2, **leased(short_lease())) as machine:
        wait_until(lambda: len(machine.coordinator.agents()) == 2, what="both agents")
        pids = [machine.worker_pid(rank) for rank in (0, 1)]
        freeze(machine.etcd.pid)
        time.sleep(2.2)  # every lease runs out
        os.kill(machine.etcd.pid, signal.SIGCONT)
        wait_until(lambda: len(machine.coordinator.agents()) == 2, what="the agents' return")
        time.sleep(2 * short_lease() + 2.5)  # longer than the time that agents give each other to return
        assert all(alive(pid) for pid in pids), machine.wait(within_seconds=0).output
        machine.coordinator.request_stop("ds_bamboo stop")
        outcome = machine.wait(within_seconds=60)
    assert outcome.exit_codes == {0: 1, 1: 1}, outcome.output
    assert outcome.output.count("it was stopped before training began (ds_bamboo stop)") == 1, outcome.output


def test_an_outage_longer_than_all_leases_loses_nobody(fork_server: ForkServer) -> None:
    with Machine(fork_server, workers.train, **leased(short_lease())) as machine:
        epoch_of(machine, 0)
        freeze(machine.etcd.pid)
        time.sleep(2.2)  # every lease runs out
        os.kill(machine.etcd.pid, signal.SIGCONT)
        wait_until(lambda: len(machine.coordinator.members()) == 4, what="all members' return")
        time.sleep(2.5)  # longer than the time that agents give members to return
        assert epoch_of(machine, 0).number == 0
        assert len(machine.coordinator.members()) == 4
        killed = machine.kill_worker(3)
        assert ranks(epoch_of(machine, 1)) == [0, 1, 2]
        assert time.monotonic() - killed < stretched(1), "after the outage losses are noticed as before"
        outcome = finish(machine)
    assert outcome.exit_codes == ALL_WELL, outcome.output


def test_an_outage_is_told_of_once_a_machine_and_so_is_its_end(fork_server: ForkServer) -> None:
    """By one agent of each machine, in turn; how many outages a busy machine makes of it is not the point."""
    with Machine(fork_server, workers.train, nodes=("vm-0", "vm-0", "vm-1", "vm-1")) as machine:
        wait_until(lambda: len(machine.coordinator.progress(0)) == 4, within_seconds=60, what="all to know epoch 0")
        freeze(machine.etcd.pid)
        silent = f"etcd at {machine.endpoints[0]} has not answered for "
        back = f"etcd at {machine.endpoints[0]} answers again, after "
        wait_until(
            lambda: all(silent in machine.output(rank) for rank in (0, 2)), within_seconds=60, what="word of the outage"
        )
        os.kill(machine.etcd.pid, signal.SIGCONT)
        wait_until(
            lambda: all(back in machine.output(rank) for rank in (0, 2)), within_seconds=60, what="word of its end"
        )
        outcome = finish(machine)
    assert outcome.exit_codes == ALL_WELL, outcome.output
    for rank in (0, 2):
        told = re.findall(r"has not answered for|answers again, after", outcome.outputs[rank])
        assert told[:2] == ["has not answered for", "answers again, after"], outcome.output
        assert all(one != following for one, following in itertools.pairwise(told)), outcome.output
    assert all("etcd at" not in outcome.outputs[rank] for rank in (1, 3)), outcome.output


def test_a_death_during_an_outage_is_settled_after_it(fork_server: ForkServer) -> None:
    with Machine(fork_server, workers.train, **leased(short_lease())) as machine:
        epoch_of(machine, 0)
        freeze(machine.etcd.pid)
        machine.kill_worker(1)
        told = "(its process was killed by SIGKILL); etcd does not answer, and survivors wait for it"
        wait_until(lambda: told in machine.output(1), what="word of the loss that waits")
        time.sleep(2.5)
        os.kill(machine.etcd.pid, signal.SIGCONT)
        epoch_of(machine, 1)
        time.sleep(2.5)  # longer than the time that agents give members to return
        epoch = epoch_of(machine, 1)
        assert epoch.number == 1 and ranks(epoch) == [0, 2, 3]
        outcome = finish(machine)
    assert outcome.exit_codes == ALL_WELL, outcome.output
    assert outcome.output.count(told) == 1, outcome.output


def test_a_killed_etcd_comes_back_and_nobody_is_lost(fork_server: ForkServer) -> None:
    lease = short_lease()
    with Machine(fork_server, workers.train, **leased(lease)) as machine:
        epoch_of(machine, 0)
        os.kill(machine.etcd.pid, signal.SIGKILL)
        killed = machine.kill_worker(2)
        assert ranks(epoch_of(machine, 1)) == [0, 1, 3]
        assert time.monotonic() - killed < lease + stretched(3)
        outcome = finish(machine)
    assert outcome.exit_codes == ALL_WELL, outcome.output


def test_an_etcd_that_lost_all_its_data_costs_nobody_anything(fork_server: ForkServer, tmp_path: Path) -> None:
    server = ManualEtcd(tmp_path / "etcd")
    server.start()
    try:
        with Machine(fork_server, workers.train, endpoints=[str(server.endpoint)], **leased(short_lease())) as machine:
            epoch_of(machine, 0)
            server.kill()
            server.wipe()
            server.start()
            wait_until(lambda: len(machine.coordinator.members()) == 4, within_seconds=30, what="all members' return")
            time.sleep(2.5)  # longer than the time that agents give members to return
            assert epoch_of(machine, 0).number == 0
            machine.kill_worker(2)
            assert ranks(epoch_of(machine, 1)) == [0, 1, 3]
            outcome = finish(machine)
        assert outcome.exit_codes == ALL_WELL, outcome.output
    finally:
        server.kill()


def test_without_a_coordinator_a_signal_still_ends_everything_in_time(fork_server: ForkServer) -> None:
    with Machine(fork_server, workers.train) as machine:
        epoch_of(machine, 0)
        freeze(machine.etcd.pid)
        start = time.monotonic()
        for rank in range(4):
            machine.signal_agent(rank, signal.SIGTERM)
        outcome = machine.wait(within_seconds=60)
        assert time.monotonic() - start < stretched(10)
        assert set(outcome.exit_codes.values()) == {143}, outcome.output
        for rank in range(4):
            assert not alive(machine.worker_pid(rank))
        os.kill(machine.etcd.pid, signal.SIGCONT)


def test_a_signal_while_the_worker_is_started_ends_agent_and_job(fork_server: ForkServer, tmp_path: Path) -> None:
    output = tmp_path / "output"
    request = ForkRequest(reference(interrupted_agent.main), output=str(output))
    assert fork_server.fork(request).exit_code(within_seconds=30) == 143, output.read_text()
    assert "SIGTERM was sent to the agent of rank 0" in output.read_text()


def test_two_jobs_on_one_coordinator_do_not_disturb_each_other(fork_server: ForkServer) -> None:
    with Machine(fork_server, workers.train, workers=2) as one:
        with Machine(fork_server, workers.train, workers=2, endpoints=one.endpoints) as two:
            epoch_of(one, 0)
            epoch_of(two, 0)
            one.signal_agent(0, signal.SIGTERM)
            ended = one.wait(within_seconds=60)
            assert 0 not in ended.exit_codes.values()
            assert epoch_of(two, 0).number == 0
            two.kill_worker(1)
            assert ranks(epoch_of(two, 1)) == [0]
            assert finish(two).exit_codes == {0: 0, 1: 0}
