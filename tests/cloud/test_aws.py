"""Amazon: tokens, their renewal, both kinds of notice, and what stands in the way."""

from __future__ import annotations

import threading
import time

import pytest

from deepspeed_bamboo.cloud.aws import AwsMetadata
from deepspeed_bamboo.cloud.errors import MetadataError
from deepspeed_bamboo.testing.fake_aws import AWS_ACTION, AWS_REBALANCE, AWS_TOKEN, HTML, as_aws
from deepspeed_bamboo.testing.fake_metadata import FakeMetadata, Question, Reply

DATE = "Tue, 15 Sep 2026 08:20:00 GMT"
ACTION = '{"action": "terminate", "time": "2026-09-15T08:21:40Z"}'
STOP = threading.Event()


def test_identity_with_a_token(fake: FakeMetadata) -> None:
    as_aws(fake)
    identity = AwsMetadata(base_url=fake.url).identify(STOP, timeout_seconds=2)
    assert (identity.instance, identity.zone, identity.cloud) == ("i-0123456789abcdef0", "us-east-1b", "aws")
    assert [question.method for question in fake.questions] == ["PUT", "GET", "GET"]


def test_404_is_no_notice(fake: FakeMetadata) -> None:
    as_aws(fake)
    assert AwsMetadata(base_url=fake.url).poll(STOP) == []


@pytest.mark.parametrize(("action", "word"), [("terminate", "terminated"), ("stop", "stopped"), ("hibernate", "hib")])
def test_interruption(fake: FakeMetadata, action: str, word: str) -> None:
    fake.date = DATE
    as_aws(fake).page(AWS_ACTION, Reply(ACTION.replace("terminate", action)))
    before = time.monotonic()
    (notice,) = AwsMetadata(base_url=fake.url).poll(STOP)
    after = time.monotonic()
    assert (notice.kind, notice.source) == ("preemption", "aws")
    assert word in notice.reason and "2026-09-15T08:21:40Z" in notice.reason
    assert notice.deadline_seconds is not None and before <= notice.deadline_seconds - 100 <= after


def test_rebalance_recommendation_has_no_deadline(fake: FakeMetadata) -> None:
    as_aws(fake).page(AWS_REBALANCE, Reply('{"noticeTime": "2026-10-27T08:22:00Z"}'))
    (notice,) = AwsMetadata(base_url=fake.url).poll(STOP)
    assert (notice.kind, notice.deadline_seconds) == ("rebalance", None)


def test_a_token_is_used_until_it_is_refused_then_renewed(fake: FakeMetadata) -> None:
    tokens = as_aws(fake)
    tokens.page(AWS_ACTION, Reply(ACTION))
    source = AwsMetadata(base_url=fake.url)
    source.poll(STOP)
    source.poll(STOP)
    assert tokens.given == 1
    tokens.expire()
    assert len(source.poll(STOP)) == 1
    assert tokens.given == 2


def test_401_for_ever(fake: FakeMetadata) -> None:
    fake.routes[f"PUT {AWS_TOKEN}"] = Reply("token==")
    fake.default = Reply("", 401)
    source = AwsMetadata(base_url=fake.url)
    for _ in range(2):
        with pytest.raises(MetadataError, match=r"a fresh token is refused too.*BAMBOO_ZONE"):
            source.poll(STOP)


@pytest.mark.parametrize("refusal", [Reply(status=403), Reply(HTML), Reply("a b"), Reply(""), Reply("x" * 5000)])
def test_no_usable_token_still_serves_version_1(fake: FakeMetadata, refusal: Reply) -> None:
    fake.routes[f"PUT {AWS_TOKEN}"] = refusal
    fake.routes[f"GET {AWS_ACTION}"] = Reply(ACTION)
    source = AwsMetadata(base_url=fake.url)
    assert len(source.poll(STOP)) == 1
    source.poll(STOP)
    assert len(fake.wait_for(1, AWS_TOKEN)) == 1, "the token is not asked for again while nothing refuses"


def test_hop_limit_of_1(fake: FakeMetadata) -> None:
    """The PUT gets no answer; version 2 refuses to go without."""
    fake.routes[f"PUT {AWS_TOKEN}"] = Reply("token", until=fake.closed)
    fake.default = Reply("", 401)
    began = time.monotonic()
    with pytest.raises(MetadataError, match=r"no answer within 0\.1 s.*HttpPutResponseHopLimit"):
        AwsMetadata(base_url=fake.url).identify(STOP, timeout_seconds=0.1)
    assert time.monotonic() - began < 1


def test_hop_limit_repaired_while_the_job_runs(fake: FakeMetadata) -> None:
    fake.routes[f"PUT {AWS_TOKEN}"] = Reply(until=fake.closed)
    fake.default = Reply("", 401)
    source = AwsMetadata(base_url=fake.url, timeout_seconds=0.1)
    with pytest.raises(MetadataError):
        source.poll(STOP)
    as_aws(fake).page(AWS_ACTION, Reply(ACTION))
    assert len(source.poll(STOP)) == 1


@pytest.mark.parametrize(
    "reply",
    [
        Reply("oops", 500),
        Reply(HTML),
        Reply('{"action": "terminate", "time": "20'),
        Reply(ACTION, missing_bytes=5),
        Reply('{"action": "dance", "time": "2026-09-15T08:21:40Z"}'),
        Reply('{"action": ["terminate"]}'),
        Reply("[1]"),
        Reply("[" * 100_000),
        Reply("x" * 300_000),
        Reply(status=302, headers={"Location": AWS_REBALANCE}),
    ],
    ids=lambda reply: f"{reply.status}-{reply.text[:20]}",
)
def test_bad_answers_are_metadata_errors(fake: FakeMetadata, reply: Reply) -> None:
    as_aws(fake).page(AWS_ACTION, reply)
    with pytest.raises(MetadataError) as caught:
        AwsMetadata(base_url=fake.url).poll(STOP)
    assert caught.value.answered


def test_a_failing_question_hides_only_its_own_kind(fake: FakeMetadata) -> None:
    tokens = as_aws(fake)
    tokens.page(AWS_ACTION, Reply(ACTION))
    tokens.page(AWS_REBALANCE, Reply(HTML, 500))
    source = AwsMetadata(base_url=fake.url)
    assert [notice.kind for notice in source.poll(STOP)] == ["preemption"]
    tokens.page(AWS_ACTION, Reply(HTML, 500))
    assert [notice.kind for notice in source.poll(STOP)] == ["preemption"], "what was found holds"


@pytest.mark.parametrize("moment", ["soon", "", None, 7, "2026-99-99T00:00:00Z"])
def test_a_time_that_cannot_be_read_is_still_a_notice(fake: FakeMetadata, moment: object) -> None:
    import json

    as_aws(fake).page(AWS_ACTION, Reply(json.dumps({"action": "stop", "time": moment})))
    (notice,) = AwsMetadata(base_url=fake.url).poll(STOP)
    assert (notice.kind, notice.deadline_seconds) == ("preemption", None)


def test_a_notice_comes_again_while_it_holds_and_goes_when_withdrawn(fake: FakeMetadata) -> None:
    tokens = as_aws(fake)
    tokens.page(AWS_ACTION, Reply(ACTION))
    source = AwsMetadata(base_url=fake.url)
    first, again = source.poll(STOP), source.poll(STOP)
    assert first[0].identity == again[0].identity
    tokens.page(AWS_ACTION, Reply("", 404))
    assert source.poll(STOP) == []


def test_the_token_travels_in_its_header_only(fake: FakeMetadata) -> None:
    as_aws(fake)
    AwsMetadata(base_url=fake.url).poll(STOP)

    def carries(question: Question) -> bool:
        return question.headers.get("x-aws-ec2-metadata-token") == "token-1=="

    assert [carries(question) for question in fake.questions] == [False, True, True]
