"""What a job leaves in the history of an etcd that nobody compacts."""

from __future__ import annotations

import pytest

from deepspeed_bamboo.coordination.errors import CoordinatorUnavailable
from deepspeed_bamboo.coordination.etcd import EtcdStore
from deepspeed_bamboo.coordination.job import JobCoordinator
from deepspeed_bamboo.coordination.memory import MemoryStore
from deepspeed_bamboo.coordination.server import PrivateEtcd
from deepspeed_bamboo.doctor.coordinator import room
from deepspeed_bamboo.runtime.job.status import StatusTeller, period_seconds
from tests.coordination.helpers import unique_name, wait_until

_QUOTA_BYTES = 2 * 1024**3
_KEY_BYTES = 200  # what etcd keeps beside the value: the key, twice, and its revisions


def test_a_job_of_a_year_stays_below_etcds_quota() -> None:
    seconds, written, year = 0.0, 0, 365 * 86_400
    value = '{"worker":"a-node-of-some-length-12-0.3","t":1700000000.1234567,"step":123456789,'
    value += '"loss":1.2345678901234567,"seconds":0.123456789,"mode":"eager"}'
    while seconds < 86_400:
        seconds += period_seconds(seconds)
        written += len(value) + _KEY_BYTES
    assert written * year / 86_400 < _QUOTA_BYTES, f"{written} bytes a day"
    assert period_seconds(0.0) == 1.0, "whoever looks at a job that has just begun sees it move"


def test_events_are_written_when_there_are_new_ones() -> None:
    store = MemoryStore()
    job, written = JobCoordinator(store, job="j"), []
    store.watch("/deepspeed_bamboo/.events/", lambda event: written.append(event.kind))
    teller = StatusTeller(job, worker="w0")
    teller.note("mode", step=1, reporter=True, fields={"reason": "auto"})
    for step in (1, 2):
        teller.note("step", step=step, reporter=True, fields={"loss": 1.0, "seconds": 0.1})
        wait_until(lambda s=step: (job.status() or {}).get("step") == s, what="the status")
    teller.close()
    assert [event["event"] for event in (job.status() or {})["events"]] == ["mode"]
    assert written.count("put") == 1
    store.close()


def test_history_is_compacted_when_asked_for(etcd_server: PrivateEtcd) -> None:
    from etcd3 import etcdrpc

    store = EtcdStore([etcd_server.endpoint], call_timeout_seconds=2.0)
    job = JobCoordinator(store, job=unique_name())
    for step in (1, 2):
        job.publish_status({"t": 1.0, "step": step})
    entry = store.get(job._keys.status)
    assert entry is not None
    job.compact_history()
    job.compact_history()
    assert (job.status() or {})["step"] == 2
    old = etcdrpc.RangeRequest(key=job._keys.status.encode(), revision=entry.revision - 1)
    with pytest.raises(CoordinatorUnavailable, match="compacted"):
        store._range(old)
    job.clean_up()
    store.close()


def test_doctor_looks_at_the_room_that_is_left(etcd_server: PrivateEtcd) -> None:
    store = EtcdStore([etcd_server.endpoint])
    assert 0 < store.database_bytes() < 100_000_000
    store.close()
    assert list(room("e:1", 900_000_000)) == []
    (finding,) = room("e:1", 1_500_000_000)
    assert "1500 MB" in str(finding) and "compact" in str(finding)
