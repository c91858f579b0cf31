"""Requests to a job and reports about it: the part of its shared state that decides nothing by itself."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

from deepspeed_bamboo.coordination.keys import JobKeys
from deepspeed_bamboo.coordination.records import Drain, EndedJob, JobFailure
from deepspeed_bamboo.coordination.run import OwnRun
from deepspeed_bamboo.coordination.store import KeyValueStore
from deepspeed_bamboo.coordination.values import Reader, encode
from deepspeed_bamboo.core.placement import WorkerId

_PIECE_LETTERS = 400_000  # etcd takes values of up to 1.5 MB, and JSON may write a letter as several


class JobNews:
    """Requests, reports and the end of ``job``. Every call raises CoordinatorUnavailable as the store does."""

    def __init__(self, store: KeyValueStore, *, job: str, prefix: str) -> None:
        """Raises EndpointError when ``job`` cannot be part of a key."""
        self.job = job
        self._store = store
        self._read = Reader(store)
        self._keys = JobKeys(prefix=prefix, job=job)
        self._run = OwnRun(store, self._keys, job=job)

    def hand_in_report(self, epoch_number: int, worker: WorkerId, report: dict[str, Any]) -> None:
        """Write the report of ``worker`` at the start of an epoch, for :meth:`reports`. Watches do not deliver it."""
        self._store.put(self._keys.report(epoch_number, worker), encode(report))

    def reports(self, epoch_number: int) -> dict[WorkerId, dict[str, Any]]:
        """The reports of that epoch so far, by worker."""
        return dict(self._read.children(self._keys.reports(epoch_number), "report"))

    def publish_progress(self, epoch_number: int, name: str, value: dict[str, Any]) -> None:
        """Publish something about the start of an epoch to all watchers. ``name`` is one that a worker could have."""
        self._store.put(self._keys.progress(epoch_number, name), encode(value))

    def progress(self, epoch_number: int) -> dict[str, dict[str, Any]]:
        """What was published for that epoch so far, by name."""
        return dict(self._read.children(self._keys.all_progress(epoch_number), "progress"))

    def publish_long(self, epoch_number: int, name: str, value: dict[str, Any]) -> None:
        """Publish a value of any length for that epoch, in pieces. :meth:`watch` does not deliver it."""
        text = encode(value)
        pieces = [text[start : start + _PIECE_LETTERS] for start in range(0, len(text), _PIECE_LETTERS)]
        for number, piece in enumerate(pieces):
            key = self._keys.long_value(epoch_number, name, number)
            self._store.put(key, encode({"text": piece, "of": len(pieces)}))

    def long_value(self, epoch_number: int, name: str) -> dict[str, Any] | None:
        """What was published under that name; None where some is missing."""
        first = self._read.one(self._keys.long_value(epoch_number, name, 0), "piece")
        if first is None:
            return None
        # One by one: together they may be more than an answer may have.
        rest = [self._read.one(self._keys.long_value(epoch_number, name, n), "piece") for n in range(1, first["of"])]
        if any(piece is None or piece["of"] != first["of"] for piece in rest):
            return None
        whole: dict[str, Any] = json.loads("".join(piece["text"] for piece in (first, *rest)))
        return whole

    def publish_whereabouts(self, worker: WorkerId, where: dict[str, Any]) -> None:
        """Publish the call in which ``worker`` has waited for long. :meth:`watch` does not deliver it."""
        self._store.put(self._keys.whereabouts(worker), encode(where))

    def whereabouts(self) -> dict[WorkerId, dict[str, Any]]:
        """The last such report of each worker."""
        return dict(self._read.children(self._keys.all_whereabouts, "whereabouts"))

    def publish_hang(self, worker: WorkerId, facts: Mapping[str, Any] | None) -> None:
        """Publish that ``worker`` stands still, with the known facts; None: it no longer does."""
        if facts is None:
            self._store.delete(self._keys.hang(worker))
        else:
            self._store.put(self._keys.hang(worker), encode(dict(facts)))

    def hangs(self) -> dict[WorkerId, dict[str, Any]]:
        """The workers that stand still."""
        return dict(self._read.children(self._keys.hangs, "hang"))

    def publish_work(self, worker: WorkerId, facts: Mapping[str, Any] | None) -> None:
        """Publish the progress of long work of ``worker`` (see ``long_work.py``); None: it is over.

        :meth:`watch` does not deliver it.
        """
        if facts is None:
            self._store.delete(self._keys.work(worker))
        else:
            self._store.put(self._keys.work(worker), encode(dict(facts)))

    def works(self) -> dict[WorkerId, dict[str, Any]]:
        """The workers' long work at this moment."""
        return dict(self._read.children(self._keys.all_works, "work"))

    def request_drain(self, node: str, *, deadline_seconds: float | None, reason: str) -> None:
        """Ask the job to leave ``node``, at the latest in so many seconds (None: no hurry).

        The latest request stands, except that one without a deadline does not take a deadline away.
        Raises EndpointError when ``node`` cannot be the name of a node.
        """
        key = self._keys.drain(node)
        value = Drain(node, deadline_seconds, reason, time_seconds=time.time())
        while True:
            known, revision = self._read.with_revision(key, "drain")
            if known is not None and known.deadline_seconds is not None and deadline_seconds is None:
                return
            if self._store.compare_and_swap(key, encode(value.to_json()), revision=revision):
                return

    def cancel_drain(self, node: str) -> None:
        """Withdraw the request, or remove it once the node has been left; the node may host workers again."""
        self._store.delete(self._keys.drain(node))

    def draining(self) -> dict[str, Drain]:
        """The nodes that the job is asked to leave."""
        return dict(self._read.children(self._keys.drains, "drain"))

    def request_stop(self, reason: str) -> None:
        """Ask the job to end at the next boundary. The first reason stands."""
        self._put_first(self._keys.stop, "stop", {"reason": reason})

    def stop_requested(self) -> str | None:
        """Why the job is asked to end, if it is."""
        reason: str | None = self._read.one(self._keys.stop, "stop")
        return reason

    def fail(self, failure: JobFailure) -> bool:
        """Record why the job ends. The first failure stands; False when there was one already."""
        self._run.check()
        return self._put_first(self._keys.failure, "failure", failure.to_json())

    def failure(self) -> JobFailure | None:
        """Why the job ends, if it failed."""
        failure: JobFailure | None = self._read.one(self._keys.failure, "failure")
        return failure

    def finish(self, summary: dict[str, Any]) -> None:
        """Record that the job is complete. The first summary stands."""
        self._run.check()
        self._put_first(self._keys.finished, "finished", summary)

    def finished(self) -> dict[str, Any] | None:
        """The summary, if the job is complete."""
        found: dict[str, Any] | None = self._read.one(self._keys.finished, "finished")
        return found

    def publish_facts(self, facts: dict[str, Any]) -> None:
        """Publish what all workers of this job have in common. :meth:`watch` does not deliver it."""
        self._store.put(self._keys.facts, encode(facts))

    def facts(self) -> dict[str, Any] | None:
        """What was published of that, if anything."""
        found: dict[str, Any] | None = self._read.one(self._keys.facts, "facts")
        return found

    def publish_status(self, status: dict[str, Any]) -> None:
        """Publish the state of the job, without events, for onlookers. :meth:`watch` does not deliver it."""
        self._store.put(self._keys.status, encode(status))

    def publish_events(self, events: list[dict[str, Any]]) -> None:
        """Publish the latest events; apart from the status, because they change seldom and are longer."""
        self._store.put(self._keys.events, encode({"events": events}))

    def status(self) -> dict[str, Any] | None:
        """The last published status, with ``events``; None if there is none."""
        found, events = self._read.one(self._keys.status, "status"), self._read.one(self._keys.events, "events")
        return None if found is None else {"events": [], **found, **(events or {})}

    def publish_past(self, piece: int, value: dict[str, Any]) -> None:
        """Publish one piece of what scripts were returned, see ``runtime/job/past_results.py``."""
        self._store.put(f"{self._keys.all_past}{piece}", encode(value))

    def past(self, piece: int) -> dict[str, Any] | None:
        """That piece, if it is published."""
        found: dict[str, Any] | None = self._read.one(f"{self._keys.all_past}{piece}", "past")
        return found

    def compact_history(self) -> None:
        """Make the store forget replaced values, of this job and of all others in it."""
        self._store.compact()

    def end(self) -> EndedJob | None:
        """How the job has ended, if it has."""
        failure, finished, stop = self.failure(), self.finished(), self.stop_requested()
        if failure is not None:
            step = int((self.status() or {}).get("step", -1))
            return EndedJob(self.job, "failed", failure.message, step, time.time(), failure.kind)
        if finished is None:
            return None
        state, detail = ("finished", "") if stop is None else ("stopped", stop)
        return EndedJob(self.job, state, detail, last_step(finished, self.status()), time.time())

    def last_end(self) -> EndedJob | None:
        """How the last job of this name ended, as long as that is kept and no other was started."""
        found: EndedJob | None = self._read.one(self._keys.last_end, "ended_job")
        return found

    def _put_first(self, key: str, kind: str, value: dict[str, Any]) -> bool:
        """Write unless there is a value already; one that is none of its ``kind`` does not count."""
        known, revision = self._read.with_revision(key, kind)
        return known is None and self._store.compare_and_swap(key, encode(value), revision=revision)


def last_step(finished: Mapping[str, Any], status: Mapping[str, Any] | None) -> int:
    """The last step of a job that is complete; -1 if that isn't known. ``status`` may be older."""
    done = finished.get("step")
    return done - 1 if isinstance(done, int) else int((status or {}).get("step", -1))
