"""Google: preemption at once, maintenance that stops the machine, and impostors."""

from __future__ import annotations

import threading
import time

import pytest

from deepspeed_bamboo.cloud.errors import MetadataError
from deepspeed_bamboo.cloud.gcp import GcpMetadata
from deepspeed_bamboo.cloud.watcher import NoticeWatcher
from deepspeed_bamboo.testing.fake_aws import HTML
from deepspeed_bamboo.testing.fake_metadata import FakeMetadata, Question, Reply
from tests.cloud.services import GCP, GOOGLE, Arrivals, as_gcp

STOP = threading.Event()


def test_identity(fake: FakeMetadata) -> None:
    as_gcp(fake)
    identity = GcpMetadata(base_url=fake.url).identify(STOP, timeout_seconds=2)
    assert (identity.instance, identity.zone, identity.cloud) == ("4520031799277581759", "us-central1-a", "gcp")


def test_nothing_to_tell(fake: FakeMetadata) -> None:
    as_gcp(fake)
    assert GcpMetadata(base_url=fake.url).poll(STOP) == []


def test_preemption_ends_the_waiting_at_once(fake: FakeMetadata) -> None:
    """The second question hangs in the server until the machine is preempted, and is answered then."""
    as_gcp(fake)
    preempted = threading.Event()

    def serve(question: Question) -> Reply:
        if "wait_for_change" not in question.query:
            return Reply("FALSE", headers={**GOOGLE, "ETag": "e1"})
        return Reply("TRUE", headers={**GOOGLE, "ETag": "e2"}, until=preempted)

    fake.routes[f"GET {GCP}/preempted"] = serve
    source = GcpMetadata(base_url=fake.url)
    source.poll(STOP)
    arrivals = Arrivals()
    with NoticeWatcher(source, arrivals):
        waiting = fake.wait_for(2, f"{GCP}/preempted")[1]
        assert waiting.query == {"wait_for_change": "true", "last_etag": "e1", "timeout_sec": "10"}
        assert arrivals.notices == []
        before = time.monotonic()
        preempted.set()
        (notice,) = arrivals.wait_for(1)
    assert time.monotonic() - before < 2
    assert (notice.kind, notice.source) == ("preemption", "gcp")
    assert notice.deadline_seconds is not None and 29 < notice.deadline_seconds - before < 32


def test_the_deadline_does_not_move(fake: FakeMetadata) -> None:
    as_gcp(fake)
    fake.routes[f"GET {GCP}/preempted"] = Reply("TRUE", headers=GOOGLE)
    source = GcpMetadata(base_url=fake.url)
    assert source.poll(STOP) == source.poll(STOP)


@pytest.mark.parametrize(
    ("event", "kinds"),
    [("NONE", []), ("MIGRATE_ON_HOST_MAINTENANCE", []), ("TERMINATE_ON_HOST_MAINTENANCE", ["maintenance"])],
)
def test_maintenance(fake: FakeMetadata, event: str, kinds: list[str]) -> None:
    as_gcp(fake)
    fake.routes[f"GET {GCP}/maintenance-event"] = Reply(event, headers=GOOGLE)
    source = GcpMetadata(base_url=fake.url)
    assert [notice.kind for notice in source.poll(STOP)] == kinds
    fake.routes[f"GET {GCP}/maintenance-event"] = Reply("NONE", headers=GOOGLE)
    assert source.poll(STOP) == [], "an event that is over is no notice"


def test_404_is_no_notice(fake: FakeMetadata) -> None:
    as_gcp(fake)
    fake.routes = {}
    assert GcpMetadata(base_url=fake.url).poll(STOP) == []


@pytest.mark.parametrize(
    "reply",
    [
        Reply("oops", 500, GOOGLE),
        Reply(HTML, headers=GOOGLE),
        Reply("TRUE"),  # without the header it isn't Google's server
        Reply("TRUE", headers=GOOGLE, missing_bytes=1),
        Reply("", headers=GOOGLE),
        Reply(status=301, headers={**GOOGLE, "Location": "/elsewhere"}),
    ],
    ids=lambda reply: f"{reply.status}-{reply.text[:10]}",
)
def test_bad_answers_are_metadata_errors(fake: FakeMetadata, reply: Reply) -> None:
    as_gcp(fake)
    fake.routes[f"GET {GCP}/preempted"] = reply
    with pytest.raises(MetadataError) as caught:
        GcpMetadata(base_url=fake.url).poll(STOP)
    assert caught.value.answered


def test_maintenance_without_an_answer_does_not_hide_a_preemption(fake: FakeMetadata) -> None:
    as_gcp(fake)
    fake.routes[f"GET {GCP}/maintenance-event"] = Reply(HTML, 500)
    fake.routes[f"GET {GCP}/preempted"] = Reply("TRUE", headers=GOOGLE)
    assert [notice.kind for notice in GcpMetadata(base_url=fake.url).poll(STOP)] == ["preemption"]


def test_after_a_failure_the_question_does_not_wait_for_a_change(fake: FakeMetadata) -> None:
    as_gcp(fake)
    replies = [Reply("FALSE", headers={**GOOGLE, "ETag": "e1"}), Reply(HTML, 500), Reply("TRUE", headers=GOOGLE)]
    fake.routes[f"GET {GCP}/preempted"] = lambda question: replies.pop(0)
    source = GcpMetadata(base_url=fake.url)
    assert source.poll(STOP) == []
    with pytest.raises(MetadataError):
        source.poll(STOP)
    assert len(source.poll(STOP)) == 1
    asked = ["wait_for_change" in question.query for question in fake.wait_for(3, f"{GCP}/preempted")]
    assert asked == [False, True, False]


@pytest.mark.parametrize("zone", ["us-central1-a", HTML, "projects/1/zones/", "projects/1/zones/a b"])
def test_a_zone_that_is_none(fake: FakeMetadata, zone: str) -> None:
    as_gcp(fake)
    fake.routes[f"GET {GCP}/zone"] = Reply(zone, headers=GOOGLE)
    with pytest.raises(MetadataError, match="no zone"):
        GcpMetadata(base_url=fake.url).identify(STOP, timeout_seconds=2)
