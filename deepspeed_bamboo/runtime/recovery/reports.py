"""The survivors of a loss exchange their reports through the coordinator, since they have no channels yet.

The first member collects the reports and publishes them as one: if every worker read each of them, the traffic would
grow with the square of the workers. If the first member is lost, there is a new epoch, and this begins again.
"""

from __future__ import annotations

import base64
import json
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from deepspeed_bamboo.coordination import EpochRecord
from deepspeed_bamboo.core.consensus import Report, keeper
from deepspeed_bamboo.core.placement import WorkerId
from deepspeed_bamboo.core.roles import collector
from deepspeed_bamboo.errors import MessageError
from deepspeed_bamboo.runtime.job.session import WorkerSession

# A watch tells of what is published at once; this bounds the damage of a lost one, and of a coordinator that lost data.
_LOOK_AGAIN_SECONDS = 2.0
# Between two looks at the reports that have been handed in: so long, or so many times what the look took.
_NAP_SECONDS, _NAP_SHARE = 0.001, 2.0
# Under which names everybody's reports and the whole report of the keeper are published; no worker has them.
_EVERYBODYS, _KEEPERS = "everybodys", "keepers"
_LIMIT_BYTES = 2**28


def exchange_reports(
    own: Report, record: EpochRecord, *, session: WorkerSession, handed_in: Callable[[], None] = lambda: None
) -> dict[WorkerId, Report]:
    """Hand in ``own``; return everybody's, with the texts of agreements that this worker has missed.

    ``handed_in`` is called once the report is out. Raises what interrupts a wait.
    """
    coordinator, number = session.coordinator, record.number
    outline = own.outline().to_json()

    def hand_in() -> None:
        session.with_retries(lambda: coordinator.hand_in_report(number, session.worker, outline))

    hand_in()
    handed_in()
    if collector(record.members) == session.worker:
        everybodys = _collected(session, number, record.members, again=hand_in)
        session.with_retries(lambda: coordinator.publish_progress(number, _EVERYBODYS, packed(everybodys)))
    else:
        everybodys = unpacked(_published(session, number, _EVERYBODYS, again=hand_in))
    reports = {worker: _report_of(everybodys, worker) for worker in record.members}
    most, needing = keeper(reports)
    if most == session.worker:
        # An agreement may hold as much as the script's own tensors.
        session.with_retries(lambda: coordinator.publish_long(number, _KEEPERS, own.to_json()))
        session.with_retries(lambda: coordinator.publish_progress(number, _KEEPERS, {}))
    elif most is not None and session.worker in needing:
        _published(session, number, _KEEPERS)
        reports[most] = _report_of({most: _long(session, number, _KEEPERS)}, most)
    return reports


def _collected(
    session: WorkerSession, epoch: int, workers: Sequence[WorkerId], *, again: Callable[[], None]
) -> dict[WorkerId, dict[str, Any]]:
    """The reports of all ``workers``, once they are there. ``again`` is called now and then until they are."""
    began = time.monotonic()
    while True:
        looked = time.monotonic()
        if looked - began > _LOOK_AGAIN_SECONDS:
            again()
            began = looked
        reports = session.with_retries(lambda: session.coordinator.reports(epoch))
        if all(worker in reports for worker in workers):
            return reports
        nap = max(_NAP_SECONDS, _NAP_SHARE * (time.monotonic() - looked))
        session.interruption.wait_until(lambda: False, timeout_seconds=nap)


def _published(
    session: WorkerSession, epoch: int, name: str, *, again: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """What is published under ``name``, once it is. ``again`` is called now and then until it is."""
    seen = session.interruption.changes
    published: Mapping[str, dict[str, Any]] = session.published(epoch)
    while name not in published:
        if session.interruption.wait_for_change(since=seen, timeout_seconds=_LOOK_AGAIN_SECONDS):
            seen = session.interruption.changes
            published = session.published(epoch)
        else:
            again()
            published = session.with_retries(lambda: session.coordinator.progress(epoch))
    return published[name]


def _long(session: WorkerSession, epoch: int, name: str) -> dict[str, Any]:
    while (found := session.with_retries(lambda: session.coordinator.long_value(epoch, name))) is None:
        session.interruption.wait_until(lambda: False, timeout_seconds=_LOOK_AGAIN_SECONDS)
    return found


def packed(reports: Mapping[WorkerId, Mapping[str, Any]]) -> dict[str, Any]:
    """``reports`` as one value, compressed: they are much alike, and every worker gets it."""
    text = json.dumps(reports, separators=(",", ":"))
    return {"zlib": base64.b64encode(zlib.compress(text.encode())).decode("ascii")}


def unpacked(value: Mapping[str, Any]) -> dict[WorkerId, dict[str, Any]]:
    """Inverse of :func:`packed`. Raises MessageError for anything that it has not made."""
    try:
        text = zlib.decompressobj()
        content = text.decompress(base64.b64decode(value["zlib"], validate=True), _LIMIT_BYTES)
        reports = json.loads(content)
    except (ValueError, TypeError, KeyError, RecursionError, MemoryError, zlib.error) as error:
        raise MessageError(f"a value in etcd that holds no reports of this job's workers ({error})") from error
    if not isinstance(reports, dict) or not text.eof:
        raise MessageError("a value in etcd that holds no reports of this job's workers, or more than there can be")
    return reports


def _report_of(reports: Mapping[WorkerId, Any], worker: WorkerId) -> Report:
    """Raises MessageError when there is none, or it makes no sense."""
    try:
        return Report.from_json(reports[worker])
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise MessageError(
            f"the report of worker {worker} in etcd is none ({type(error).__name__}: {error})"
        ) from error
