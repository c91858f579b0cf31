"""Jobs with the real engine whose scripts hold the GIL for three leases: nobody is lost, and no bit changes."""

from __future__ import annotations

import re

import pytest

from deepspeed_bamboo.testing.fork_server import ForkServer
from deepspeed_bamboo.testing.harness import Machine
from tests.elastic import gil_script
from tests.elastic.test_agent import leased, short_lease

HANGS = {"after_seconds": 1.0, "start_seconds": 600.0}


def run(fork_server: ForkServer, who: str, when: str) -> tuple[set[str], str]:
    """The digests and all output of a job of two workers, which must end well."""
    lease = short_lease()
    with Machine(
        fork_server, gil_script.main, workers=2, argv=[str(3 * lease), who, when], hangs=HANGS, **leased(lease)
    ) as machine:
        outcome = machine.wait(within_seconds=200)
    assert outcome.exit_codes == {0: 0, 1: 0}, outcome.output
    return set(re.findall(r"digest (\w+) in epoch 0", outcome.output)), outcome.output


@pytest.fixture(scope="module")
def undisturbed(fork_server: ForkServer) -> set[str]:
    digests, _ = run(fork_server, "none", "between")
    assert len(digests) == 1
    return digests


@pytest.mark.parametrize(
    ("who", "when"),
    [
        ("all", "start"),
        ("1", "between"),
        *(pytest.param(who, when, marks=pytest.mark.sweep) for who, when in (("all", "between"), ("1", "start"))),
    ],
)
def test_who_holds_the_gil_for_three_leases_is_not_lost(
    fork_server: ForkServer, undisturbed: set[str], who: str, when: str
) -> None:
    digests, output = run(fork_server, who, when)
    assert digests == undisturbed, output
    assert "lost" not in output, output


def test_a_hook_that_holds_up_a_pass_is_named_with_the_instruction(
    fork_server: ForkServer, undisturbed: set[str]
) -> None:
    digests, output = run(fork_server, "1", "hook")
    assert digests == undisturbed, output
    named = re.findall(r"\(rank 1 on \S+ has stood still for \d+ s in step 3, in FNC 0.1 0; its main thread", output)
    assert len(named) >= 2, f"by its own agent and by that of the reporter\n{output}"
    assert "in sleep_with_the_gil" in output, output
