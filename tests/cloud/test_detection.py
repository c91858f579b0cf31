"""Which cloud this is: found in bounded time, and never a reason not to train."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from deepspeed_bamboo.cloud import Detection, Identity, detect
from deepspeed_bamboo.errors import ConfigError
from deepspeed_bamboo.testing.fake_aws import AWS_TOKEN, HTML, as_aws
from deepspeed_bamboo.testing.fake_metadata import FakeMetadata, Reply
from tests.cloud.services import as_azure, as_gcp

Dress = Callable[[FakeMetadata], object]


@pytest.fixture
def nowhere() -> Iterator[str]:
    """An address that accepts connections (by its backlog) and says nothing, like a filtered network."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        yield f"http://127.0.0.1:{silent.getsockname()[1]}"


def all_at(url: str) -> dict[str, str]:
    """On every cloud all three ask the same address."""
    return {f"BAMBOO_{cloud}_METADATA": url for cloud in ("AWS", "GCP", "AZURE")}


@pytest.mark.parametrize(
    ("dress", "expected"),
    [
        (as_aws, Identity("i-0123456789abcdef0", "us-east-1b", "aws")),
        (as_gcp, Identity("4520031799277581759", "us-central1-a", "gcp")),
        (as_azure, Identity("spot_7", "westeurope-2", "azure")),
    ],
    ids=["aws", "gcp", "azure"],
)
def test_finds_the_cloud(dress: Dress, expected: Identity, fake: FakeMetadata) -> None:
    dress(fake)
    found = detect(all_at(fake.url))
    assert found.identity == expected
    assert found.source is not None and found.source.name == expected.cloud


def test_nothing_answers(nowhere: str, caplog: pytest.LogCaptureFixture) -> None:
    began = time.monotonic()
    found = detect(all_at(nowhere))
    assert time.monotonic() - began < 2
    assert (found.identity, found.source) == (Identity("unknown", "unknown", "none"), None)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "aws, gcp, azure" in line and "zone unknown, notices off" in line and "set BAMBOO_ZONE" in line


def test_connections_refused_cost_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    began = time.monotonic()
    assert detect(all_at(f"http://127.0.0.1:{port}")).source is None
    assert time.monotonic() - began < 1


def test_the_search_runs_beside_the_start(nowhere: str) -> None:
    """Making it returns at once; the budget counts from then, not from when the result is asked for."""
    began = time.monotonic()
    detection = Detection(all_at(nowhere), budget_seconds=0.4)
    assert time.monotonic() - began < 0.2
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("bamboo-detect-")]
    for thread in threads:
        thread.join(5)
    began = time.monotonic()
    result = detection.result()
    assert time.monotonic() - began < 0.2
    assert detection.result() is result


@pytest.mark.parametrize(
    ("environment", "zones", "expected"),
    [
        ({}, "auto", "us-east-1b"),
        ({"BAMBOO_ZONE": "rack-3"}, "auto", "rack-3"),
        ({"BAMBOO_ZONE": "rack-3"}, "hall-1", "hall-1"),
        ({"BAMBOO_ZONE": ""}, "auto", "us-east-1b"),
    ],
)
def test_an_explicit_zone_wins(environment: dict[str, str], zones: str, expected: str, fake: FakeMetadata) -> None:
    as_aws(fake)
    found = detect({**all_at(fake.url), **environment}, zones=zones)
    assert found.identity == Identity("i-0123456789abcdef0", expected, "aws")
    assert found.source is not None


def test_an_explicit_zone_without_a_cloud(nowhere: str, caplog: pytest.LogCaptureFixture) -> None:
    found = detect({**all_at(nowhere), "BAMBOO_ZONE": "rack-3"}, budget_seconds=0.2)
    assert found.identity.zone == "rack-3"
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.parametrize(
    "reply",
    [Reply("", 401), Reply("oops", 500), Reply(HTML), Reply('{"name": "x"'), Reply("{}"), Reply("x", missing_bytes=1)],
    ids=["401", "500", "HTML", "truncated", "empty", "broken"],
)
def test_something_else_answers(reply: Reply, fake: FakeMetadata, caplog: pytest.LogCaptureFixture) -> None:
    """A hotel's gateway, a broken proxy: whatever it says, it isn't a cloud."""
    fake.default = reply
    found = detect(all_at(fake.url))
    assert (found.identity.zone, found.source) == ("unknown", None)
    assert len(caplog.records) == 1


def test_hop_limit_of_1_is_named_in_the_log(fake: FakeMetadata, caplog: pytest.LogCaptureFixture) -> None:
    fake.routes[f"PUT {AWS_TOKEN}"] = Reply(until=fake.closed)
    fake.default = Reply("", 401)
    began = time.monotonic()
    assert detect(all_at(fake.url)).identity.zone == "unknown"
    assert time.monotonic() - began < 2
    assert "HttpPutResponseHopLimit" in caplog.text


def test_slow_answers_don_t_hold_the_start_up(fake: FakeMetadata) -> None:
    as_azure(fake)
    fake.routes["GET /metadata/instance/compute"] = Reply(until=fake.closed)
    began = time.monotonic()
    assert detect(all_at(fake.url)).identity.cloud == "none"
    assert time.monotonic() - began < 2


def test_a_named_cloud_is_watched_even_if_it_is_silent_now(nowhere: str) -> None:
    found = detect({**all_at(nowhere), "BAMBOO_CLOUD": "gcp"}, budget_seconds=0.2)
    assert found.source is not None and found.source.name == "gcp"
    assert found.identity == Identity("unknown", "unknown", "gcp")


def test_no_cloud_is_asked_when_told_so(fake: FakeMetadata, caplog: pytest.LogCaptureFixture) -> None:
    as_aws(fake)
    assert detect({**all_at(fake.url), "BAMBOO_CLOUD": "none"}).source is None
    assert (fake.questions, caplog.records) == ([], [])


def test_a_script_takes_the_place_of_the_clouds_notices(fake: FakeMetadata) -> None:
    as_aws(fake)
    script = {"BAMBOO_NOTICES": '[{"after_seconds": 1, "seconds": 5}]'}
    found = detect({**all_at(fake.url), **script})
    assert found.source is not None and found.source.name == "scripted"
    assert fake.questions == []
    found = detect({**all_at(fake.url), **script, "BAMBOO_CLOUD": "aws"})
    assert found.source is not None and found.source.name == "scripted"
    assert found.identity.zone == "us-east-1b"


def test_addresses_as_other_programs_read_them(fake: FakeMetadata, nowhere: str) -> None:
    as_gcp(fake)
    environment = {
        "AWS_EC2_METADATA_DISABLED": "true",
        "GCE_METADATA_HOST": fake.url.removeprefix("http://"),
        "BAMBOO_AZURE_METADATA": nowhere,
    }
    assert detect(environment).identity.cloud == "gcp"
    assert AWS_TOKEN not in [question.path for question in fake.questions]


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"BAMBOO_CLOUD": "amazon"}, "BAMBOO_CLOUD is 'amazon'; it must be one of auto, none, aws"),
        ({"BAMBOO_AWS_METADATA": "169.254.169.254"}, "a base address is http://host"),
        ({"BAMBOO_NOTICES": "[{}]"}, "exactly one of after_seconds"),
    ],
)
def test_what_cannot_be_used(environment: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        detect(environment)
