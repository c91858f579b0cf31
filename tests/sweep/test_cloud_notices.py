"""Each cloud's notice, from its metadata service to the real engine: the node is left in time, nothing changes."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from deepspeed_bamboo.core.grid import Grid
from deepspeed_bamboo.eventlog.files import read_events
from deepspeed_bamboo.sweep.gate import Gate, gated_worker
from deepspeed_bamboo.sweep.random_run import RandomRun, run_undisturbed, script_of
from deepspeed_bamboo.testing.fake_aws import as_aws
from deepspeed_bamboo.testing.fake_metadata import FakeMetadata
from deepspeed_bamboo.testing.fork_server import ForkServer
from deepspeed_bamboo.testing.harness import Machine
from tests.cloud.services import as_azure, as_gcp
from tests.coordination.helpers import wait_until
from tests.elastic.test_notices import aws_takes_it, azure_takes_it, gcp_takes_it

ROOT = Path(__file__).parent.parent.parent
RUN = RandomRun(
    script=ROOT / "scripts" / "train.py", base=ROOT / "configs" / "cpu-demo.json", grid=Grid(1, 4), steps=14
)
# Before which step which cloud takes its node.
CLOUDS = {
    3: ("b", "aws", as_aws, aws_takes_it),
    6: ("c", "gcp", as_gcp, gcp_takes_it),
    9: ("d", "azure", as_azure, azure_takes_it),
}
DEADLINE_SECONDS = 30.0


@pytest.mark.sweep
def test_each_clouds_notice_empties_its_node_before_the_deadline(fork_server: ForkServer, tmp_path: Path) -> None:
    reference = run_undisturbed(RUN, server=fork_server, folder=tmp_path / "undisturbed")
    folder = tmp_path / "noticed"
    gate = Gate(folder / "gate")
    (folder / "gate").mkdir(parents=True)
    gate.close_before(CLOUDS)
    given: dict[str, float] = {}
    with ExitStack() as services:
        fakes = {node: services.enter_context(FakeMetadata()) for node, *_ in CLOUDS.values()}
        notices = {}
        for node, source, quiet, _ in CLOUDS.values():
            quiet(fakes[node])
            notices[node] = {"source": source, "base_url": fakes[node].url, "poll_seconds": 0.1}
        machine = services.enter_context(
            Machine(
                fork_server,
                gated_worker,
                workers=4,
                argv=[str(folder / "gate"), *script_of(RUN, [], folder=folder)],
                nodes=["a", "b", "c", "d"],
                notices=notices,
            )
        )
        for step, (node, _, _, takes) in CLOUDS.items():
            wait_until(lambda step=step: gate.is_reached(step), within_seconds=60, what=f"step {step}")
            given[node] = time.time()
            takes(fakes[node], DEADLINE_SECONDS)
            wait_until(lambda node=node: node in machine.coordinator.draining(), what=f"the drain of {node}")
            gate.open(step)
        outcome = machine.wait(within_seconds=60)
    assert outcome.exit_codes == {0: 0, 1: 0, 2: 0, 3: 0}, outcome.output
    events = [event for path in (folder / "events").glob("events-*.jsonl") for event in read_events(path)]
    left = {worker: event["t"] for event in events for worker in event.get("leaving", ())}
    assert {worker.split("-")[0] for worker in left} == {"b", "c", "d"}
    for worker, moment in left.items():
        assert moment - given[worker.split("-")[0]] < DEADLINE_SECONDS
    assert not [event for event in events if event["event"] in ("failover", "loss_of_node")], (
        "a drain recomputes nothing"
    )
    finished = [event for event in events if event["event"] == "finished"]
    assert [(event["step"], event["digest"]) for event in finished] == [(RUN.steps, reference.digest)]
    assert json.dumps(reference.losses[RUN.steps - 1]) == json.dumps(finished[0]["loss"])
