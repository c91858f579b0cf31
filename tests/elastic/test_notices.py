"""From a cloud's notice to a drained node, and from a confused metadata service to nothing at all."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest

from deepspeed_bamboo.cloud.hints import likely_cloud
from deepspeed_bamboo.config.section import NoticesConfig
from deepspeed_bamboo.elastic.notices import look_around, notice_plan
from deepspeed_bamboo.testing.fake_aws import AWS_REBALANCE, HTML, as_aws
from deepspeed_bamboo.testing.fake_metadata import FakeMetadata, Reply
from deepspeed_bamboo.testing.fork_server import ForkServer
from deepspeed_bamboo.testing.harness import Machine
from tests.cloud.services import GCP, GOOGLE, as_azure, as_gcp, azure_event
from tests.coordination.helpers import wait_until
from tests.elastic import workers
from tests.elastic.launched import LaunchedJob
from tests.elastic.test_agent import ALL_WELL, epoch_of, finish, ranks

NODES = ["a", "b", "c", "d"]


@pytest.fixture
def fake() -> Iterator[FakeMetadata]:
    with FakeMetadata() as service:
        yield service


def aws_takes_it(fake: FakeMetadata, seconds: float) -> None:
    as_aws(fake).take(after_seconds=seconds)


def gcp_takes_it(fake: FakeMetadata, seconds: float) -> None:
    as_gcp(fake)
    fake.routes[f"GET {GCP}/preempted"] = Reply("TRUE", headers=GOOGLE)


def azure_takes_it(fake: FakeMetadata, seconds: float) -> None:
    moment = datetime.now(timezone.utc) + timedelta(seconds=seconds)
    as_azure(fake, azure_event(NotBefore=format_datetime(moment, usegmt=True)))


@pytest.mark.parametrize(("source", "takes"), [("aws", aws_takes_it), ("gcp", gcp_takes_it), ("azure", azure_takes_it)])
def test_each_clouds_notice_drains_its_node_before_the_deadline(
    fork_server: ForkServer, fake: FakeMetadata, source: str, takes: Callable[[FakeMetadata, float], None]
) -> None:
    {"aws": as_aws, "gcp": as_gcp, "azure": as_azure}[source](fake)
    notices = {"c": {"source": source, "base_url": fake.url, "poll_seconds": 0.1}}
    with Machine(fork_server, workers.train_elastically, nodes=NODES, notices=notices) as machine:
        epoch_of(machine, 0)
        start = time.monotonic()
        takes(fake, 25)
        wait_until(lambda: ranks(epoch_of(machine, 0)) == [0, 1, 3], within_seconds=25, what="the epoch without c")
        assert time.monotonic() - start < 25
        outcome = finish(machine)
    assert outcome.exit_codes == ALL_WELL, outcome.output
    assert outcome.outputs[2].count("node c is being left within") == 1, outcome.output
    assert "] lost" not in outcome.output, outcome.output


NEVER = threading.Event()
CONFUSED: dict[str, Reply] = {
    "no service": Reply(HTML, 404),
    "no token": Reply("", 401),
    "broken": Reply("oops", 500),
    "another service": Reply(HTML),
    "no HTTP": Reply(raw=b"\x00\x01garbage"),
    "no answer": Reply(until=NEVER),
    "no end": Reply("x" * 100, trickle=True),
}


# One way for each cloud; what each makes of every reply is also tested without processes, in tests/cloud.
QUICK = {("aws", "no answer"), ("gcp", "another service"), ("azure", "no end")}


@pytest.mark.parametrize(
    ("source", "reply"),
    [
        pytest.param(source, reply, marks=() if (source, reply) in QUICK else pytest.mark.sweep)
        for source in ("aws", "gcp", "azure")
        for reply in CONFUSED
    ],
)
def test_a_confused_metadata_service_harms_nobody(
    fork_server: ForkServer, fake: FakeMetadata, source: str, reply: str
) -> None:
    fake.default = CONFUSED[reply]
    notices = {"a": {"source": source, "base_url": fake.url, "poll_seconds": 0.05}}
    with Machine(fork_server, workers.train_elastically, workers=2, nodes=NODES[:2], notices=notices) as machine:
        epoch_of(machine, 0)
        wait_until(lambda: len(fake.questions) >= 2, what="the service to be asked")
        assert machine.coordinator.draining() == {}
        outcome = finish(machine)
    assert outcome.exit_codes == {0: 0, 1: 0}, outcome.output
    assert "Traceback" not in outcome.output, outcome.output


def test_a_rebalance_recommendation_is_told_and_drains_only_if_wanted(
    fork_server: ForkServer, fake: FakeMetadata
) -> None:
    as_aws(fake).page(AWS_REBALANCE, Reply('{"noticeTime": "2026-01-01T00:00:00Z"}'))
    common = {"source": "aws", "base_url": fake.url, "poll_seconds": 0.1}
    notices = {"b": common, "d": {**common, "rebalance": "drain"}}
    with Machine(fork_server, workers.train_elastically, nodes=NODES, notices=notices) as machine:
        wait_until(lambda: ranks(epoch_of(machine, 0)) == [0, 1, 2], what="the epoch without d")
        wait_until(lambda: "may be taken soon" in machine.output(1), what="b to be told")
        outcome = finish(machine)
    assert outcome.exit_codes == ALL_WELL, outcome.output


def test_scripted_notices(fork_server: ForkServer) -> None:
    notices = {"b": {"source": "scripted", "script": [{"after_seconds": 0.2, "seconds": 30}]}}
    with Machine(fork_server, workers.train_elastically, nodes=NODES, notices=notices) as machine:
        wait_until(lambda: ranks(epoch_of(machine, 0)) == [0, 2, 3], what="the epoch without b")
        outcome = finish(machine)
    assert outcome.exit_codes == ALL_WELL, outcome.output


@pytest.mark.sweep
def test_sigterm_to_a_launcher_is_a_notice_if_the_user_says_so(tmp_path: Path) -> None:
    script = """
        training = FakeTraining()
        training.begin()
        print("training", flush=True)
        code = training.come_and_go()
        print("left with", code, flush=True)
        sys.exit(code)
    """
    config = {"bamboo": {"notices": {"sigterm": "drain", "grace_seconds": 20.0}, "topology": {"max_restarts": 0}}}
    options = ("--job", "drains")
    first = {"BAMBOO_NODE": "one"}
    with LaunchedJob(tmp_path / "a", script, options=options, config=config, environment=first) as one:
        one.wait_for("training", times=2)
        second = {"BAMBOO_NODE": "two"}
        with LaunchedJob(tmp_path / "b", script, slots=1, options=options, config=config, environment=second) as two:
            two.wait_for("taken in")
            two.process.send_signal(signal.SIGTERM)
            two.wait_for("left with 5")
            two.wait(within_seconds=30)
        assert "node two is being left within 20 s: SIGTERM" in two.output, two.output
        assert "] lost" not in one.output + two.output
        one.process.send_signal(signal.SIGINT)
        one.wait(within_seconds=60)


# -- without processes -----------------------------------------------------------------------------


def config(**fields: Any) -> NoticesConfig:
    return NoticesConfig(**fields)


def test_where_nothing_looks_like_a_cloud_nobody_is_asked(fake: FakeMetadata, tmp_path: Path) -> None:
    assert likely_cloud({}, description=tmp_path) == "none"
    found = look_around(config(), zones="auto", environment={"BAMBOO_CLOUD": "none"})
    assert found.identity.zone == "unknown" and notice_plan(config(), found) is None


@pytest.mark.parametrize(
    ("file", "text", "cloud"),
    [
        ("sys_vendor", "Amazon EC2\n", "aws"),
        ("product_version", "4.11.amazon\n", "aws"),
        ("product_name", "Google Compute Engine\n", "gcp"),
        ("chassis_asset_tag", "7783-7084-3265-9085-8269-3286-77\n", "azure"),
        ("sys_vendor", "Microsoft Corporation\n", "none"),
        ("sys_vendor", "QEMU\n", "none"),
    ],
)
def test_a_machines_own_description_tells_its_cloud(file: str, text: str, cloud: str, tmp_path: Path) -> None:
    (tmp_path / file).write_text(text)
    assert likely_cloud({}, description=tmp_path) == cloud
    assert likely_cloud({"GCE_METADATA_HOST": "x"}, description=tmp_path) == "gcp"


def test_zone_and_source_come_from_the_cloud_that_the_environment_shows(fake: FakeMetadata) -> None:
    as_aws(fake)
    environment = {"BAMBOO_AWS_METADATA": fake.url}
    found = look_around(config(), zones="auto", environment=environment)
    plan = notice_plan(config(poll_seconds=2.0), found)
    assert found.identity.zone == "us-east-1b" and plan is not None
    assert (plan.source.name, plan.poll_seconds, plan.drains_on_rebalance) == ("aws", 2.0, False)
    assert look_around(config(), zones="rack-7", environment=environment).identity.zone == "rack-7"


def test_without_notices_the_zone_is_still_found_if_it_is_not_known(fake: FakeMetadata) -> None:
    as_aws(fake)
    environment = {"BAMBOO_AWS_METADATA": fake.url, "BAMBOO_NOTICES": "[]"}
    found = look_around(config(source="none"), zones="auto", environment=environment)
    assert found.identity.zone == "us-east-1b" and found.source is None
    asked = len(fake.questions)
    found = look_around(config(source="none"), zones="auto", environment={**environment, "BAMBOO_ZONE": "z"})
    assert found.identity.zone == "z" and len(fake.questions) == asked
