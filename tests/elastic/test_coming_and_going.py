"""Agents whose workers join, are replaced and are drained, as real processes."""

from __future__ import annotations

import os
import signal

from deepspeed_bamboo.testing.fork_server import ForkServer
from deepspeed_bamboo.testing.harness import Machine
from tests.coordination.helpers import wait_until
from tests.elastic import workers
from tests.elastic.test_agent import ALL_WELL, epoch_of, finish, leased, ranks, short_lease


def test_two_killed_two_join_and_the_job_ends_on_four(fork_server: ForkServer) -> None:
    with Machine(fork_server, workers.train_elastically) as machine:
        epoch_of(machine, 0)
        before = {rank: machine.worker_pid(rank) for rank in (0, 2)}
        machine.kill_worker(1)
        epoch_of(machine, 1)
        machine.kill_worker(3)
        epoch_of(machine, 2)
        joined = [machine.join(), machine.join()]
        assert joined == [4, 5]
        wait_until(lambda: ranks(epoch_of(machine, 3)) in ([0, 2, 4, 5], [0, 2, 5, 4]), what="both to be taken in")
        members = machine.coordinator.members()
        assert {member.rank for member in members.values()} == {0, 2, 4, 5}
        assert all(member.joining is (member.rank in joined) for member in members.values())
        assert before == {member.rank: member.pid for member in members.values() if member.rank in before}
        outcome = finish(machine)
    assert outcome.exit_codes == {**ALL_WELL, 4: 0, 5: 0}, outcome.output
    assert "joining" in outcome.outputs[4] and "-4-0" in outcome.outputs[4], outcome.output


def test_a_standby_slot_joins_after_the_first_epoch(fork_server: ForkServer) -> None:
    with Machine(fork_server, workers.train_elastically, workers=3, start_workers=2) as machine:
        assert len(epoch_of(machine, 0).members) == 2
        wait_until(lambda: ranks(epoch_of(machine, 1)) == [0, 1, 2], what="the standby to be taken in")
        outcome = finish(machine)
    assert outcome.exit_codes == {0: 0, 1: 0, 2: 0}, outcome.output
    assert "starting" in outcome.outputs[1] and "joining" in outcome.outputs[2], outcome.output


def test_a_lost_worker_is_replaced_until_it_was_too_often(fork_server: ForkServer) -> None:
    with Machine(fork_server, workers.train_elastically, max_restarts=2) as machine:
        epoch_of(machine, 0)
        for round_, names in enumerate((".1", ".2")):
            machine.kill_worker(1, generation=round_)
            number = 2 * (round_ + 1)
            epoch = epoch_of(machine, number)
            assert epoch.members[-1].endswith(f"-1-0{names}"), epoch
        machine.kill_worker(1, generation=2)
        assert len(epoch_of(machine, 5).members) == 3
        wait_until(lambda: "topology.max_restarts" in machine.output(1), what="the agent to say so")
        outcome = finish(machine)
    assert outcome.exit_codes == ALL_WELL, outcome.output


def test_an_expelled_worker_comes_back_as_a_new_one(fork_server: ForkServer) -> None:
    with Machine(fork_server, workers.expelled_on_rank_1, max_restarts=1) as machine:
        epoch = epoch_of(machine, 2)
        assert ranks(epoch) == [0, 2, 3, 1] and epoch.members[-1].endswith("-1-0.1")
        outcome = finish(machine)
    assert outcome.exit_codes == ALL_WELL, outcome.output


def test_a_stopped_worker_is_replaced_after_its_lease(fork_server: ForkServer) -> None:
    with Machine(fork_server, workers.train_elastically, max_restarts=1, **leased(short_lease())) as machine:
        epoch_of(machine, 0)
        machine.kill_worker(2, signal.SIGSTOP)
        epoch = epoch_of(machine, 2)
        assert ranks(epoch) == [0, 1, 3, 2] and epoch.members[-1].endswith("-2-0.1")
        outcome = finish(machine)
    assert outcome.exit_codes == ALL_WELL, outcome.output


def test_those_who_join_say_where_they_are(fork_server: ForkServer) -> None:
    with Machine(fork_server, workers.train_elastically, workers=2, nodes=["a", "b"], zones=["z1", "z2"]) as machine:
        epoch_of(machine, 0)
        machine.join(node="c", zone="z3")
        epoch_of(machine, 1)
        members = machine.coordinator.members().values()
        places = sorted((member.rank, member.node, member.zone, member.joining) for member in members)
        assert places == [(0, "a", "z1", False), (1, "b", "z2", False), (2, "c", "z3", True)]
        outcome = finish(machine)
    assert outcome.exit_codes == {0: 0, 1: 0, 2: 0}, outcome.output


def test_a_drained_node_is_left_without_a_loss(fork_server: ForkServer) -> None:
    nodes = ["a", "b", "b", "c"]
    with Machine(fork_server, workers.train_elastically, nodes=nodes) as machine:
        epoch_of(machine, 0)
        machine.coordinator.request_drain("b", deadline_seconds=60.0, reason="EC2 takes it")
        wait_until(lambda: ranks(epoch_of(machine, 0)) == [0, 3], what="the epoch without b")
        wait_until(lambda: machine.coordinator.draining() == {}, what="the drain to be over")
        wait_until(lambda: set(machine.coordinator.agents()) == {0, 3}, what="the agents of b to leave")
        assert machine.coordinator.failure() is None and machine.coordinator.finished() is None
        outcome = finish(machine)
    assert outcome.exit_codes == ALL_WELL, outcome.output
    assert "lost" not in outcome.output.replace("nothing is lost", ""), outcome.output
    assert "has left; the job continues without it" in outcome.outputs[1]


def test_a_signal_that_is_a_notice_drains_the_agents_node(fork_server: ForkServer) -> None:
    with Machine(fork_server, workers.train_elastically, nodes=["a", "b", "c", "d"]) as machine:
        epoch_of(machine, 0)
        os.kill(machine.worker_pid(3), signal.SIGUSR1)  # as a scheduler does, to all processes of a node
        machine.signal_agent(3, signal.SIGUSR1)
        wait_until(lambda: ranks(epoch_of(machine, 0)) == [0, 1, 2], what="the epoch without d")
        outcome = finish(machine)
    assert outcome.exit_codes == ALL_WELL, outcome.output
    assert "SIGUSR1 was sent to the agent of rank 3" not in outcome.outputs[0]
    assert "was killed" not in outcome.output


def test_a_joiner_that_cannot_run_harms_nobody(fork_server: ForkServer) -> None:
    with Machine(fork_server, workers.cannot_join, workers=2) as machine:
        epoch_of(machine, 0)
        rank = machine.join()
        wait_until(lambda: "ImportError" in machine.output(rank), what="its traceback")
        outcome = finish(machine)
    assert outcome.exit_codes == {0: 0, 1: 0, rank: 1}, outcome.output


def test_a_joiner_whose_command_is_interrupted_leaves_alone(fork_server: ForkServer) -> None:
    with Machine(fork_server, workers.train_elastically, workers=2, **leased(short_lease())) as machine:
        epoch_of(machine, 0)
        rank = machine.join()
        epoch_of(machine, 1)
        machine.signal_agent(rank, signal.SIGINT)
        assert ranks(epoch_of(machine, 2)) == [0, 1]
        outcome = finish(machine)
    assert outcome.exit_codes == {0: 0, 1: 0, rank: 130}, outcome.output


def test_a_job_that_is_over_is_not_joined(fork_server: ForkServer) -> None:
    with Machine(fork_server, workers.train_elastically, workers=2) as machine:
        epoch_of(machine, 0)
        machine.coordinator.finish({})
        machine.wait(within_seconds=60)
        rank = machine.join()
        outcome = machine.wait(within_seconds=60)
    assert outcome.exit_codes == {0: 0, 1: 0, rank: 75}, outcome.output
    assert "ended before this machine could join" in outcome.outputs[rank]
