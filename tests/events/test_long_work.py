"""What takes long is said with size and rate; what does not is never mentioned."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_bamboo.coordination.job import JobCoordinator
from deepspeed_bamboo.coordination.memory import MemoryStore
from deepspeed_bamboo.long_work import FIRST_SECONDS, LongWork, WorkFacts, amount, pause_seconds
from deepspeed_bamboo.runtime.job.long_works import LongWorks
from tests.coordination.helpers import wait_until


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_line_has_size_share_rate_and_the_time_that_is_left() -> None:
    clock = Clock()
    work = LongWork("state of 0.2 from worker w1", total=None, clock=clock)
    clock.now += 4
    assert work.facts().in_words() == "state of 0.2 from worker w1: 4 s so far"
    work.expect(3_400_000_000)
    work.add(850_000_000)
    assert work.facts().in_words() == ("state of 0.2 from worker w1: 850 MB of 3.4 GB (25%), 212 MB/s, 12 s left")
    clock.now += 12
    work.add(2_550_000_000)
    assert work.facts().at_the_end() == "state of 0.2 from worker w1: 3.4 GB in 16.0 s, 212 MB/s"


def test_stages_are_counted_as_such() -> None:
    clock = Clock()
    work = LongWork("loading from s3://b/p", total=3, unit="stages", clock=clock)
    clock.now += 10
    work.add(1)
    assert work.facts().in_words() == "loading from s3://b/p: 1 of 3 stages (33%), 20 s left"


@pytest.mark.parametrize(("size", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (999_600, "1 MB")])
def test_bytes_are_written_as_people_read_them(size: int, text: str) -> None:
    assert amount(size, "bytes") == text


@given(age=st.floats(0, 1e6))
def test_there_is_no_line_in_the_first_two_seconds_and_at_most_one_a_second(age: float) -> None:
    pause = pause_seconds(age)
    assert pause >= 1.0 or age + pause >= FIRST_SECONDS
    assert pause <= max(FIRST_SECONDS, age / 4)


@given(done=st.integers(0, 10**15), total=st.none() | st.integers(0, 10**15), seconds=st.floats(0, 1e6))
def test_facts_read_back_equal_and_have_words_whatever_they_are(done: int, total: int | None, seconds: float) -> None:
    facts = WorkFacts("x", done, total, "bytes", seconds)
    assert WorkFacts.from_json(facts.to_json()) == facts
    assert facts.in_words().startswith("x: ") and facts.at_the_end().startswith("x: ")


def told_by(job: JobCoordinator, **options: Any) -> tuple[LongWorks, list[str]]:
    lines: list[str] = []
    return LongWorks(job, worker="w0", say=lines.append, **options), lines


def test_long_work_is_in_the_log_and_in_the_status_until_it_is_done() -> None:
    store = MemoryStore()
    job = JobCoordinator(store, job="j")
    works, lines = told_by(job, first_seconds=0.01)
    with works.watch("state of 0.1", total=2000) as work:
        work.add(1000)
        wait_until(lambda: job.works() != {}, what="the status")
        assert job.works()["w0"]["done"] == 1000
    wait_until(lambda: job.works() == {}, what="its end in the status")
    assert lines[0].startswith("state of 0.1: 1 kB of 2 kB (50%), ") and lines[-1].startswith("state of 0.1: 1 kB in ")
    with pytest.raises(KeyError), works.watch("building 0.2"):
        wait_until(lambda: job.works() != {}, what="the status")
        raise KeyError
    wait_until(lambda: job.works() == {}, what="its end in the status")
    assert not [line for line in lines if line.startswith("building 0.2: done")], "it was not"
    store.close()


def test_what_is_done_soon_is_never_mentioned() -> None:
    store = MemoryStore()
    job = JobCoordinator(store, job="j")
    works, lines = told_by(job)
    with works.watch("building 0.2"):
        pass
    wait_until(lambda: not [t for t in threading.enumerate() if t.name == "bamboo-progress"], what="the thread's end")
    assert lines == [] and job.works() == {}
    store.close()
