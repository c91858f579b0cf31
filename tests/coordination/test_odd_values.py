"""Whatever else is written under a job's keys: it is reported, passed over, and costs no thread and no call."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from deepspeed_bamboo.coordination.etcd import EtcdStore
from deepspeed_bamboo.coordination.job import JobCoordinator, running_jobs
from deepspeed_bamboo.coordination.keys import JobKeys
from deepspeed_bamboo.coordination.memory import MemoryStore
from deepspeed_bamboo.coordination.records import AgentRecord, Change, Drain, EndedJob, JobFailure
from deepspeed_bamboo.coordination.server import PrivateEtcd
from deepspeed_bamboo.coordination.store import KeyValueStore
from deepspeed_bamboo.coordination.values import _READERS, OddValueError, decode_as, encode, member_text
from tests.coordination.helpers import Collector, first_epoch, member, unique_name

GOOD: dict[str, Any] = {
    "epoch": first_epoch(["w0", "w1"]).to_json(),
    "member": json.loads(member_text(replace(member("w0"), joining=True), generation=2)),
    "agent": AgentRecord(3, "n", 77, "boot/1").to_json(),
    "failure": JobFailure("w0", "hang", "text", "").to_json(),
    "drain": Drain("n", None, "why", 1.5).to_json(),
    "ended_job": EndedJob("j", "failed", "why", 7, 1.5).to_json(),
    "stop": {"reason": "why"},
    "generation": 2,
    "next_rank": 7,
    "ended": {"generation": 1, "drained": True},
    "suspicion": {"reporter": "w0", "reason": "reset"},
    "hang": {"rank": 1, "node": "n", "doing": "FNC", "step": 3, "seconds": 61.5, "waiting": False, "stack": ""},
    "started": {"time_seconds": 1.0, "slots": 4},
    "status": {"worker": "w0", "t": 1.0, "step": 3, "loss": 2.5, "seconds": 0.1},
    "events": {"events": [{"t": 1.0, "event": "mode", "step": 3, "reason": "auto"}]},
    "past": {"losses": "AAAA", "evaluations": {"3": [0.5]}},
    "progress": {"any": 1},
    "piece": {"text": '{"a', "of": 2},
    "report": {},
    "whereabouts": {"epoch": 1},
    "work": {"what": "state of 0.1", "done": 7, "total": None, "unit": "bytes", "seconds": 2.5},
    "finished": {"step": 9},
    "facts": {"a": [1]},
}
ODD = [
    "",
    "{",
    "null",
    "[]",
    "7e400x",
    '"text"',
    '{"number": {}}',
    "\ud800".encode("utf-8", "replace").decode(),
    "[" * 2000,
]
ODD += ['{"reason": "\\ud800"}', "true", "-1", '{"generation": -1}', '{"slots": "many"}', "\0", "1" * 400]


def test_what_is_written_is_what_is_read() -> None:
    assert set(GOOD) == set(_READERS)
    for kind, value in GOOD.items():
        read = decode_as(kind, encode(value))
        again = read.to_json() if hasattr(read, "to_json") else read
        assert again == (value["reason"] if kind == "stop" else value)


def test_ten_thousand_damaged_values_are_a_clear_error_each_or_have_the_form() -> None:
    """Parts exchanged, removed and added at random, and characters changed in the text."""
    chance = random.Random(7)
    kinds = sorted(GOOD)
    parts: list[Any] = [None, True, -1, 0, 1e308, "x", "", [], ["x"], {}, {"x": 1}, [[]], "\ud800"]
    refused = 0
    for _ in range(10_000):
        kind = chance.choice(kinds)
        value = json.loads(encode(GOOD[kind]))
        if isinstance(value, dict) and value and chance.random() < 0.7:
            name = chance.choice(sorted(value))
            if chance.random() < 0.3:
                del value[name]
            else:
                value[name] = chance.choice(parts)
        text = encode(value)
        if chance.random() < 0.5:
            place = chance.randrange(len(text))
            text = text[:place] + chance.choice('x"{}[]:,0\\é') + text[place + chance.randrange(2) :]
        try:
            read = decode_as(kind, text)
        except OddValueError as error:
            refused += 1
            assert f"is no {kind}" in str(error)
        else:
            str(read).encode()
            Collector[object]()(read)
    assert 3000 < refused < 9900


@pytest.fixture
def memory() -> MemoryStore:
    return MemoryStore()


@pytest.mark.parametrize("odd", ODD)
def test_reads_pass_them_over_and_say_so_once(odd: str, memory: MemoryStore, caplog: pytest.LogCaptureFixture) -> None:
    job, keys = JobCoordinator(memory, job="j"), JobKeys(prefix="/deepspeed_bamboo", job="j")
    agent = job.register_agent(AgentRecord(0, "n", 1), lease_seconds=60)
    for key in (
        keys.agent(1),
        f"{keys.agents}one",
        keys.member("w1"),
        keys.drain("n"),
        keys.hang("w"),
        keys.ended("w"),
    ):
        memory.put(key, odd)
    for key in (keys.epoch, keys.failure, keys.stop, keys.status, keys.started, keys.next_rank, keys.generation):
        memory.put(key, odd)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert set(job.agents()) == {0} and job.members() == {} and job.draining() == {} and job.hangs() == {}
            assert job.epoch() is None and job.failure() is None and job.stop_requested() is None
            assert job.status() is None and job.started_seconds() is None and job.start_slots() == 0
    assert caplog.text.count(f"{keys.epoch} is ignored") == 1
    assert job.propose(first_epoch(["w0"]), expected=None), "what is odd is written over"
    assert job.fail(JobFailure("w0", "user_error", "m", "")) and not job.fail(JobFailure("w1", "user_error", "m", ""))
    assert job.next_rank() == 1
    agent.withdraw()
    memory.close()


def test_a_watch_outlives_them(open_store: Callable[[], KeyValueStore]) -> None:
    store, name = open_store(), unique_name()
    job, keys = JobCoordinator(store, job=name), JobKeys(prefix="/deepspeed_bamboo", job=name)
    told: Collector[Change] = Collector()
    store.put(keys.member("before"), "{")
    watch = job.watch(told)
    told.wait_for(lambda change: change.kind == "resync")
    for number, odd in enumerate(text for text in ODD if "\0" not in text):
        store.put(keys.member(f"w{number}"), odd)
        store.put(f"{keys.root}progress/x/w", odd)
        store.put(f"{keys.root}agent/x", odd)
        store.put(keys.epoch, odd)
    job.request_stop("enough")
    told.wait_for(lambda change: change.kind == "stop" and change.value == "enough")
    assert {change.kind for change in told.items} <= {"resync", "stop"}
    watch.stop()
    job.clean_up()


def test_bytes_that_are_no_text_are_passed_over(etcd_server: PrivateEtcd) -> None:
    from etcd3 import etcdrpc

    store, name = EtcdStore([etcd_server.endpoint]), unique_name()
    job, keys = JobCoordinator(store, job=name), JobKeys(prefix="/deepspeed_bamboo", job=name)
    told: Collector[Change] = Collector()
    watch = job.watch(told)
    for key in (keys.member("w").encode(), keys.members.encode() + b"\xff"):
        request = etcdrpc.PutRequest(key=key, value=b"\xff\xfe{}")
        store._connection.call(lambda stubs, timeout, r=request: stubs.kv.Put(r, timeout=timeout))
    assert job.members() == {}
    job.request_stop("enough")
    told.wait_for(lambda change: change.kind == "stop")
    watch.stop()
    job.clean_up()
    store.close()


def test_no_job_has_keys_below_anothers(memory: MemoryStore) -> None:
    """Whatever the names: ``team``'s end, or start, leaves the jobs of prefix ``/deepspeed_bamboo/team`` alone."""
    outer = JobCoordinator(memory, job="team")
    inner = JobCoordinator(memory, job="agent", prefix="/deepspeed_bamboo/team")
    kept = inner.register_agent(AgentRecord(0, "n", 1), lease_seconds=60)
    inner.propose(first_epoch(["w0"]), expected=None)
    inner.publish_status({"step": 1, "t": 1.0})
    assert outer.agents() == {} and outer.epoch() is None
    with outer.claim_name(lease_seconds=10):
        outer.record_start(slots=1)
    outer.clean_up()
    assert set(inner.agents()) == {0} and inner.epoch() is not None and inner.status() is not None
    assert running_jobs(memory, prefix="/deepspeed_bamboo/team") == ["agent"] and running_jobs(memory) == []
    kept.withdraw()
    memory.close()
