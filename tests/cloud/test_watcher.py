"""The watcher outlives whatever a source or a listener does, and says so once."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

import pytest

from deepspeed_bamboo.cloud.aws import AwsMetadata
from deepspeed_bamboo.cloud.azure import AzureMetadata
from deepspeed_bamboo.cloud.errors import MetadataError
from deepspeed_bamboo.cloud.gcp import GcpMetadata
from deepspeed_bamboo.cloud.notice import MetadataCloud, Notice
from deepspeed_bamboo.cloud.watcher import NoticeWatcher
from deepspeed_bamboo.testing.fake_aws import AWS_ACTION, AWS_TOKEN, HTML, as_aws
from deepspeed_bamboo.testing.fake_metadata import FakeMetadata, Reply
from tests.cloud.services import AZURE_COMPUTE, AZURE_EVENTS, GCP, GOOGLE, Arrivals, as_azure, as_gcp, azure_event

ONE = Notice("preemption", 5.0, "one", "test")
TWO = Notice("rebalance", None, "two", "test")


class Steps:
    """A source that takes one step of a list at each poll, and then says so and waits to be stopped."""

    name = "steps"
    interval_seconds = 0.0

    def __init__(self, *steps: Sequence[Notice] | Exception) -> None:
        self._steps = list(steps)
        self.done = threading.Event()

    def poll(self, stop: threading.Event) -> Sequence[Notice]:
        if not self._steps:
            self.done.set()
            stop.wait()
            return ()
        step = self._steps.pop(0)
        if isinstance(step, Exception):
            raise step
        return step


def watch(source: Steps, on_notice: Callable[[Notice], None]) -> None:
    """Until the source has taken its steps."""
    with NoticeWatcher(source, on_notice, first_pause_seconds=0.001, longest_pause_seconds=0.002):
        assert source.done.wait(10)


def test_each_notice_once_while_it_holds() -> None:
    arrivals = Arrivals()
    again = Notice("preemption", 5.4, "one", "test")  # the same, read again
    watch(Steps([ONE], [again, TWO], [ONE, TWO]), arrivals)
    assert arrivals.notices == [ONE, TWO]


def test_a_notice_that_went_and_came_back_is_told_again() -> None:
    arrivals = Arrivals()
    watch(Steps([ONE], [], [ONE]), arrivals)
    assert arrivals.notices == [ONE, ONE]


def test_a_failing_question_does_not_repeat_a_notice() -> None:
    arrivals = Arrivals()
    watch(Steps([ONE], MetadataError("500"), [ONE]), arrivals)
    assert arrivals.notices == [ONE]


def test_a_problem_is_logged_when_it_changes(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "deepspeed_bamboo.cloud")
    first, second = MetadataError("status 500"), KeyError("a bug")
    watch(Steps(first, first, first, second, second, [], [], first), Arrivals())
    told = [record.getMessage() for record in caplog.records]
    assert [line.partition(": ")[2].partition(";")[0] for line in told] == [
        "status 500",
        "KeyError: 'a bug'",
        "all well again",
        "status 500",
    ]


def test_a_notice_that_could_not_be_handed_on_is_told_again(caplog: pytest.LogCaptureFixture) -> None:
    """The coordinator may be away for a minute; the source (a signal) tells only once."""
    arrivals = Arrivals()
    outage = [ConnectionError("no coordinator")] * 3

    def on_notice(notice: Notice) -> None:
        if outage:
            raise outage.pop()
        arrivals(notice)

    watch(Steps([ONE], [TWO], MetadataError("500"), [], []), on_notice)
    assert arrivals.notices == [ONE, TWO]
    assert sum("could not be handed on" in record.getMessage() for record in caplog.records) <= 2


def test_pauses_double_up_to_the_longest() -> None:
    watcher = NoticeWatcher(Steps(), Arrivals(), first_pause_seconds=1.0, longest_pause_seconds=5.0)
    pauses = [watcher._next_pause_seconds("problem") for _ in range(5)]
    assert pauses == [1.0, 2.0, 4.0, 5.0, 5.0]
    assert watcher._next_pause_seconds("") == Steps.interval_seconds
    assert watcher._next_pause_seconds("problem") == 1.0


def test_stops_within_a_second_in_a_long_pause() -> None:
    failed = threading.Event()

    class Failing(Steps):
        def poll(self, stop: threading.Event) -> Sequence[Notice]:
            failed.set()
            raise MetadataError("500")

    watcher = NoticeWatcher(Failing(), Arrivals(), first_pause_seconds=60).start()
    assert failed.wait(10)
    began = time.monotonic()
    assert watcher.stop()
    assert time.monotonic() - began < 1


def test_stop_before_start_and_twice() -> None:
    watcher = NoticeWatcher(Steps(), Arrivals())
    assert watcher.stop()
    assert watcher.stop()


def test_a_listener_may_stop_its_own_watcher() -> None:
    stopped = threading.Event()

    def on_notice(notice: Notice) -> None:
        assert watcher.stop()
        stopped.set()

    watcher = NoticeWatcher(Steps([ONE]), on_notice)
    watcher.start()
    assert stopped.wait(10)
    assert watcher.stop()


# -- the clouds behind it: each malformed answer is survived, then the notice still arrives ---------------

AWS_ACTION_TEXT = '{"action": "terminate", "time": "2026-09-15T08:22:00Z"}'
BAD = {
    "500": Reply("oops", 500),
    "HTML": Reply(HTML, headers=GOOGLE),
    "401": Reply("", 401),
    "truncated": Reply('{"Events": [{"EventId": "A"', headers=GOOGLE),
    "broken off": Reply("TRUE", headers=GOOGLE, missing_bytes=2),
    "garbage": Reply(raw=b"\x16\x03\x01\r\n\r\n"),
    "hang up": Reply(raw=b""),
    "slow": Reply(until=threading.Event()),
    "trickle": Reply(trickle=True),
    "redirect": Reply(status=302, headers={"Location": "/"}),
}


def prepare(cloud: str, fake: FakeMetadata) -> tuple[MetadataCloud, list[str]]:
    """The cloud with a notice waiting, and the routes where things go wrong first."""
    if cloud == "aws":
        as_aws(fake).page(AWS_ACTION, Reply(AWS_ACTION_TEXT))
        return AwsMetadata(base_url=fake.url, timeout_seconds=0.05), [f"PUT {AWS_TOKEN}", f"GET {AWS_ACTION}"]
    if cloud == "gcp":
        as_gcp(fake)
        fake.routes[f"GET {GCP}/preempted"] = Reply("TRUE", headers=GOOGLE)
        return GcpMetadata(base_url=fake.url, timeout_seconds=0.05), [f"GET {GCP}/preempted"]
    as_azure(fake, azure_event())
    source = AzureMetadata(base_url=fake.url, timeout_seconds=0.05, first_seconds=0.05)
    return source, [f"GET {AZURE_COMPUTE}", f"GET {AZURE_EVENTS}"]


@pytest.mark.parametrize("bad", list(BAD))
@pytest.mark.parametrize("cloud", ["aws", "gcp", "azure"])
def test_bad_answers_are_survived_and_then_the_notice_arrives(cloud: str, bad: str, fake: FakeMetadata) -> None:
    source, routes = prepare(cloud, fake)
    good = dict(fake.routes)
    fake.routes.update(dict.fromkeys(routes, BAD[bad]))
    asked = f"{routes[0].split()[1]}"
    arrivals = Arrivals()
    with NoticeWatcher(source, arrivals, first_pause_seconds=0.01, longest_pause_seconds=0.02) as watcher:
        fake.wait_for(2, asked)
        assert arrivals.notices == []
        fake.routes = good
        (notice,) = arrivals.wait_for(1)
        began = time.monotonic()
        assert watcher.stop() and time.monotonic() - began < 1
    assert (notice.kind, notice.source) == ("preemption", cloud)


def test_stops_within_a_second_while_an_answer_hangs(fake: FakeMetadata) -> None:
    as_azure(fake)
    fake.routes[f"GET {AZURE_EVENTS}"] = Reply(until=fake.closed)
    watcher = NoticeWatcher(AzureMetadata(base_url=fake.url), Arrivals()).start()
    fake.wait_for(1, AZURE_EVENTS)
    began = time.monotonic()
    assert watcher.stop()
    assert time.monotonic() - began < 1
