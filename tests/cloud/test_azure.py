"""Azure: only events of this machine, only those that take it."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from deepspeed_bamboo.cloud.azure import AzureMetadata
from deepspeed_bamboo.cloud.errors import MetadataError
from deepspeed_bamboo.testing.fake_aws import HTML
from deepspeed_bamboo.testing.fake_metadata import FakeMetadata, Reply
from tests.cloud.services import AZURE_COMPUTE, AZURE_EVENTS, as_azure, azure_event

DATE = "Mon, 11 Apr 2022 22:26:28 GMT"  # 30 s before the event
STOP = threading.Event()


@pytest.mark.parametrize(("zone", "expected"), [("2", "westeurope-2"), ("", "westeurope")])
def test_identity(fake: FakeMetadata, zone: str, expected: str) -> None:
    as_azure(fake, zone=zone)
    identity = AzureMetadata(base_url=fake.url).identify(STOP, timeout_seconds=2)
    assert (identity.instance, identity.zone, identity.cloud) == ("spot_7", expected, "azure")


def test_eviction(fake: FakeMetadata) -> None:
    fake.date = DATE
    as_azure(fake, azure_event())
    before = time.monotonic()
    (notice,) = AzureMetadata(base_url=fake.url).poll(STOP)
    assert (notice.kind, notice.source) == ("preemption", "azure")
    assert notice.deadline_seconds is not None and before <= notice.deadline_seconds - 30 <= time.monotonic()


def test_an_event_that_has_started_is_due_now_and_a_new_notice(fake: FakeMetadata) -> None:
    as_azure(fake, azure_event())
    source = AzureMetadata(base_url=fake.url)
    (scheduled,) = source.poll(STOP)
    as_azure(fake, azure_event(EventStatus="Started", NotBefore=""))
    (started,) = source.poll(STOP)
    assert started.identity != scheduled.identity
    assert started.seconds_left() == 0


@pytest.mark.parametrize(
    ("changes", "kinds"),
    [
        ({"Resources": ["spot_8", "spot_9"]}, []),
        ({"Resources": ["spot_70"]}, []),
        ({"Resources": ["spot_8", "SPOT_7"]}, ["preemption"]),
        ({"Resources": "spot_7"}, []),
        ({"Resources": [7, None]}, []),
        ({"Resources": None}, []),
        ({"EventType": "Freeze"}, []),
        ({"EventType": "Reboot"}, ["maintenance"]),
        ({"EventType": "Redeploy"}, ["maintenance"]),
        ({"EventType": "Terminate"}, ["maintenance"]),
        ({"EventType": ["Preempt"]}, []),
        ({"EventStatus": "Canceled"}, []),
    ],
    ids=str,
)
def test_which_events_count(fake: FakeMetadata, changes: dict[str, Any], kinds: list[str]) -> None:
    as_azure(fake, azure_event(**changes))
    assert [notice.kind for notice in AzureMetadata(base_url=fake.url).poll(STOP)] == kinds


def test_events_of_other_machines_beside_the_own(fake: FakeMetadata) -> None:
    as_azure(fake, azure_event(EventId="B", Resources=["spot_8"]), azure_event(EventId="C"), azure_event(EventId="D"))
    reasons = [notice.reason for notice in AzureMetadata(base_url=fake.url).poll(STOP)]
    assert reasons == ["Azure event C (Preempt, Scheduled)", "Azure event D (Preempt, Scheduled)"]


def test_without_the_own_name_no_event_counts(fake: FakeMetadata) -> None:
    as_azure(fake, azure_event())
    fake.routes[f"GET {AZURE_COMPUTE}"] = Reply(HTML, 500)
    source = AzureMetadata(base_url=fake.url)
    with pytest.raises(MetadataError, match="status 500"):
        source.poll(STOP)
    fake.routes.clear()
    assert len(source.poll(STOP)) == 1, "the name is asked for again"


@pytest.mark.parametrize("moment", ["", "in a minute", None, 30])
def test_a_time_that_cannot_be_read_is_still_a_notice(fake: FakeMetadata, moment: object) -> None:
    as_azure(fake, azure_event(NotBefore=moment))
    (notice,) = AzureMetadata(base_url=fake.url).poll(STOP)
    assert (notice.kind, notice.deadline_seconds) == ("preemption", None)


@pytest.mark.parametrize(
    "reply",
    [
        Reply("oops", 500),
        Reply(HTML),
        Reply("{}"),
        Reply("null"),
        Reply('{"Events": {"EventType": "Preempt"}}'),
        Reply('{"DocumentIncarnation": 1, "Events": [{"EventId"'),
        Reply('{"Events": []}', missing_bytes=2),
        Reply("", 401),
        Reply("not here", 404),
        Reply(status=307, headers={"Location": "/elsewhere"}),
    ],
    ids=lambda reply: f"{reply.status}-{reply.text[:12]}",
)
def test_bad_answers_are_metadata_errors(fake: FakeMetadata, reply: Reply) -> None:
    as_azure(fake)
    fake.routes[f"GET {AZURE_EVENTS}"] = reply
    with pytest.raises(MetadataError) as caught:
        AzureMetadata(base_url=fake.url).poll(STOP)
    assert caught.value.answered


def test_broken_events_do_not_hide_sound_ones(fake: FakeMetadata) -> None:
    as_azure(fake, azure_event())
    import json

    fake.routes[f"GET {AZURE_EVENTS}"] = Reply(json.dumps({"Events": [None, "x", {}, azure_event()]}))
    assert len(AzureMetadata(base_url=fake.url).poll(STOP)) == 1


def test_the_first_question_may_take_long_later_ones_not(fake: FakeMetadata) -> None:
    """Azure switches Scheduled Events on when they are first asked for."""
    as_azure(fake)
    ready = threading.Event()
    fake.routes[f"GET {AZURE_EVENTS}"] = Reply('{"Events": []}', until=ready)
    source = AzureMetadata(base_url=fake.url, timeout_seconds=0.3)
    threading.Timer(0.6, ready.set).start()
    assert source.poll(STOP) == []
    fake.routes[f"GET {AZURE_EVENTS}"] = Reply('{"Events": []}', until=fake.closed)
    with pytest.raises(MetadataError, match=r"no answer within 0\.3 s"):
        source.poll(STOP)
