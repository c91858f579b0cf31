"""What ``ds_bamboo status`` shows of a running job: its step and recent events, published by the reporter."""

from __future__ import annotations

import threading
import time
from typing import Any

from deepspeed_bamboo.coordination import CoordinatorUnavailable, JobCoordinator
from deepspeed_bamboo.runtime.job.past_results import CALL, PastResults

# Each value written stays in etcd until its history is compacted. So a job that has run for long says less often where
# it is: at these rates 2 to 3 MB a day. No worker waits for it or notices it.
_SHORTEST_SECONDS, _LONGEST_SECONDS = 1.0, 10.0
_PART_OF_AGE = 1 / 60
_CHANGES = ("loss_of_node", "reconfigured", "notice", "slow_worker", "mode", "decision")
_TOLD = (*_CHANGES, "checkpoint", "fatal_restore", "restored")
_OF_STEP = ("loss", "seconds", "mode", "slow")
_BEGINNINGS = ("taken", "expected", "nothing")  # not worth a message, or only their end is
_PERIODIC = "checkpoint"
_LOSS = "loss_of_node"
_KEPT, _KEPT_LOSSES = 8, 3  # losses stay longer than what else happens


class StatusTeller:
    """Tells the newest step in a thread of its own, which begins with the first one. Never blocks its caller."""

    def __init__(self, coordinator: JobCoordinator, *, worker: str, past: PastResults | None = None) -> None:
        """``past``: is published before each step that is told."""
        self._past = past
        self._coordinator = coordinator
        self._worker = worker
        self._changed = threading.Condition()
        self._newest: dict[str, Any] | None = None
        self._events: list[dict[str, Any]] = []
        self._closed = False
        self._thread: threading.Thread | None = None

    def note(self, event: str, *, step: int, reporter: bool, fields: dict[str, Any]) -> None:
        """This worker has logged ``event``. Events are kept by all, for any of them may become the reporter."""
        with self._changed:
            if event in _TOLD and fields.get("action") not in _BEGINNINGS:
                noted = {"t": time.time(), "event": event, "step": step, **fields}
                # Of those that come again and again the newest of each kind: else there would soon be nothing else.
                self._events = _newest([*(e for e in self._events if not _replaces(noted, e)), noted])
            if event != "step" or not reporter or self._closed:
                return
            self._newest = {
                "t": time.time(),
                "step": step,
                **({} if self._past is None else {CALL: self._past.call_of(step)}),
                **{name: fields[name] for name in _OF_STEP if name in fields},
            }
            self._changed.notify()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="bamboo-status", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Tell nothing any more. Does not wait."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _run(self) -> None:
        began = time.monotonic()
        told: list[dict[str, Any]] | None = None  # as this worker has published them last
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._newest is not None)
                if self._closed:
                    return
                newest, self._newest = self._newest, None
                own = list(self._events)
            try:
                events = _newest(_merged(self._told_before() if told is None else told, own))
                if events != told:
                    self._coordinator.publish_events(events)
                    told = events
                if self._past is not None:
                    self._past.publish()
                self._coordinator.publish_status({"worker": self._worker, **(newest or {})})
            except CoordinatorUnavailable:
                told = None  # the next one will do
            with self._changed:
                self._changed.wait_for(lambda: self._closed, timeout=period_seconds(time.monotonic() - began))

    def _told_before(self) -> list[dict[str, Any]]:
        """The events that the reporter before has told."""
        before = self._coordinator.status() or {}
        return [] if before.get("worker") == self._worker else list(before.get("events", []))


def period_seconds(age_seconds: float) -> float:
    """How long to wait before the next word, after so much time of this worker as the reporter."""
    return min(_LONGEST_SECONDS, max(_SHORTEST_SECONDS, age_seconds * _PART_OF_AGE))


def _newest(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of ``events``, which are in order, that are shown: the newest, the last losses, and the last checkpoint.

    By that one the screen says that the next is overdue, however much has happened since.
    """
    losses = [index for index, event in enumerate(events) if event["event"] == _LOSS][-_KEPT_LOSSES:]
    saved = [n for n, event in enumerate(events) if event["event"] == _PERIODIC and event.get("action") == "saved"][-1:]
    shown = {*range(len(events))[-_KEPT:], *losses, *saved}
    return [event for index, event in enumerate(events) if index in shown]


def _merged(earlier: list[dict[str, Any]], own: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All events in order, those that the reporter before has told and the own ones, which may be the same."""
    known = {_what(event) for event in own}
    others = [event for event in earlier if _what(event) not in known]
    others = [event for event in others if not any(_replaces(newer, event) for newer in own)]
    return sorted([*others, *own], key=lambda event: float(event["t"]))


def _replaces(newer: dict[str, Any], older: dict[str, Any]) -> bool:
    """Whether the older one need not be shown any more: a checkpoint saved before, or one that failed before."""
    return newer["event"] == older["event"] == _PERIODIC and newer.get("action") == older.get("action")


def _what(event: dict[str, Any]) -> tuple[object, ...]:
    """What makes it the same event for all workers, who note it a moment apart and with figures of their own."""
    return event["event"], event["step"], event.get("reason"), event.get("path"), tuple(event.get("workers", ()))
