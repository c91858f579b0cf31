"""What is said at the start of machines that pass for one, and of losses that are not survived."""

from __future__ import annotations

import dataclasses
import signal

import pytest

from deepspeed_bamboo.coordination import AgentRecord, EpochRecord, Member
from deepspeed_bamboo.elastic.exposure import namesakes, not_survived
from deepspeed_bamboo.testing.fork_server import ForkServer
from deepspeed_bamboo.testing.harness import Machine
from tests.coordination.helpers import first_epoch, member
from tests.elastic import workers
from tests.elastic.test_agent import ALL_WELL, epoch_of, finish, ranks


def agents(*places: tuple[str, str, int]) -> dict[int, AgentRecord]:
    """By rank: node, machine, launcher."""
    return {
        rank: AgentRecord(rank, node, 1, machine, launcher) for rank, (node, machine, launcher) in enumerate(places)
    }


def on_nodes(*nodes: str, protected: bool = True) -> tuple[EpochRecord, dict[str, Member]]:
    epoch = first_epoch([f"w{rank}" for rank in range(len(nodes))], protected=protected)
    return epoch, {
        worker: dataclasses.replace(member(worker, rank=rank), node=node)
        for rank, (worker, node) in enumerate(zip(epoch.members, nodes, strict=True))
    }


def test_machines_that_share_a_name_are_told_apart_from_launchers_on_one() -> None:
    assert namesakes(agents(("a", "m1/1", 7), ("a", "m1/1", 7), ("b", "m2/1", 7))) == []
    (text,) = namesakes(agents(("node", "m1/1", 7), ("node", "m1/1", 7), ("node", "m2/1", 9), ("node", "m2/1", 9)))
    assert text.startswith("ranks 0, 1 and ranks 2, 3 run on different machines that are all called node")
    assert "BAMBOO_NODE" in text
    (text,) = namesakes(agents(("node", "m1/1", 7), ("node", "m1/1", 8)))
    assert text.startswith("rank 0 and rank 1 have launchers of their own on node, and count as one node")
    assert namesakes({0: AgentRecord(0, "n", 1), 1: AgentRecord(1, "n", 2)}) == [], "an agent that does not say where"


@pytest.mark.parametrize(
    ("nodes", "said"),
    [
        (
            ("a", "a", "a", "a"),
            "all 4 workers are on node a: the job survives the loss of a worker, but not of the node",
        ),
        (("a", "b", "c", "d"), None),
        (("a", "b", "a", "b"), None),  # no neighbours on one
        (("a", "a", "b", "c"), "the loss of this node would end the job, since neighbours share it: a "),
        (("a", "a", "b", "b"), "the loss of any of these nodes would end the job, since neighbours share it: a, b "),
    ],
)
def test_nodes_that_hold_neighbours_are_named(nodes: tuple[str, ...], said: str | None) -> None:
    text = not_survived(*on_nodes(*nodes))
    assert text is None if said is None else (text or "").startswith(said)


def test_without_any_protection_the_nodes_are_not_the_point() -> None:
    assert not_survived(*on_nodes("a", "a", "b", protected=False)) is None


def test_the_first_agent_says_so_and_only_that(fork_server: ForkServer) -> None:
    with Machine(fork_server, workers.train, nodes=("a", "a", "b", "c")) as machine:
        epoch_of(machine, 0)
        machine.kill_worker(2, signal.SIGKILL)
        assert ranks(epoch_of(machine, 1)) == [0, 1, 3]
        outcome = finish(machine)
    assert outcome.exit_codes == ALL_WELL, outcome.output
    assert outcome.output.count("would end the job, since neighbours share it: a ") == 1, outcome.output
    assert "neighbours share it" in outcome.outputs[0]
