"""What is said of an etcd that is away, and how a first call waits for it; no etcd."""

from __future__ import annotations

import pytest

from deepspeed_bamboo.coordination import CoordinatorUnavailable, LeaseExpired
from deepspeed_bamboo.elastic.outage import OutageNews, once_it_answers


def said(news: OutageNews, *seconds: float) -> list[str]:
    return [text for text in map(news.hear, seconds) if text is not None]


def test_an_outage_and_its_end_are_told_of_once_each() -> None:
    news = OutageNews(["a:1", "b:2"], lease_seconds=3, gives_up_after_seconds=None)
    assert said(news, 0.1, 1.0, 4.9) == [], "renewals come in their time"
    assert said(news, 5.2, 6.2, 39.0) == [
        "etcd at a:1, b:2 has not answered for 5 s; training continues, but a loss would wait for it"
    ]
    assert said(news, 0.3, 0.4) == ["etcd at a:1, b:2 answers again, after 39 s"]
    assert len(said(news, 5.5, 0.0)) == 2, "the next one is told of too"


def test_a_long_lease_is_renewed_seldom() -> None:
    news = OutageNews(["a:1"], lease_seconds=30, gives_up_after_seconds=None)
    assert said(news, 10.5, 20.0) == []
    assert len(said(news, 23.0)) == 1


def test_an_etcd_of_the_jobs_own_is_not_waited_for_for_ever() -> None:
    (text,) = said(OutageNews(["a:1"], lease_seconds=3, gives_up_after_seconds=60), 5.0)
    assert text.endswith("; if it is not back within 60 s, the job ends")


def test_a_first_call_waits_for_an_etcd_that_is_slow_to_answer() -> None:
    busy = CoordinatorUnavailable(endpoints=["a:1"], tried_seconds=1, reason="no answer")
    errors: list[Exception] = [busy, LeaseExpired(1)]

    def call() -> str:
        if errors:
            raise errors.pop()
        return "registered"

    assert once_it_answers(call, within_seconds=60) == "registered"

    def refuse() -> str:
        errors.append(busy)
        raise busy

    with pytest.raises(CoordinatorUnavailable, match="no answer"):
        once_it_answers(refuse, within_seconds=0)
    assert len(errors) == 1
