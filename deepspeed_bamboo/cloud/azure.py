"""Microsoft Azure: instance metadata and Scheduled Events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from threading import Event
from typing import Any

from deepspeed_bamboo.cloud.errors import MetadataError
from deepspeed_bamboo.cloud.metadata_http import Answer, MetadataClient
from deepspeed_bamboo.cloud.notice import Identity, Notice, NoticeKind
from deepspeed_bamboo.cloud.timestamps import deadline_of

BASE_URL = "http://169.254.169.254"

_COMPUTE = "/metadata/instance/compute?api-version=2021-02-01"
_EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"

# Freeze is absent: the machine pauses for some seconds and lives on.
_KINDS: Mapping[str, NoticeKind] = {
    "Preempt": "preemption",
    "Terminate": "maintenance",
    "Redeploy": "maintenance",
    "Reboot": "maintenance",
}
_LONGEST_SECONDS = 900.0  # the longest warning that Azure documents
_FIRST_SECONDS = 125.0  # the first question switches Scheduled Events on and may take two minutes


class AzureMetadata:
    """Evictions of spot machines (``preemption``) and what restarts or ends a machine (``maintenance``).

    Scheduled Events list what happens to the whole scale set or availability set; only events that name
    this machine count. They are never confirmed, so Azure waits until their time. An event that starts
    before its time is reported again, with a deadline of now.
    """

    name = "azure"
    interval_seconds = 1.0  # what Azure recommends

    def __init__(
        self, *, base_url: str = BASE_URL, timeout_seconds: float = 5.0, first_seconds: float = _FIRST_SECONDS
    ) -> None:
        """``timeout_seconds``: the limit of each question of :meth:`poll`; ``first_seconds``: until one was answered.

        Raises ConfigError for a wrong address.
        """
        self._client = MetadataClient(base_url)
        self._timeout_seconds = timeout_seconds
        self._events_seconds = first_seconds
        self._machine: str | None = None

    def identify(self, stop: Event, *, timeout_seconds: float) -> Identity:
        """Name and zone (``region-zone``, or the region alone where it has no zones).

        Raises MetadataError when this isn't Azure or doesn't answer.
        """
        compute = self._get(_COMPUTE, stop, timeout_seconds).json_object("GET /metadata/instance/compute: the answer")
        name, location, zone = (compute.get(key) for key in ("name", "location", "zone"))
        if not isinstance(name, str) or not name or not isinstance(location, str) or not location:
            raise MetadataError("GET /metadata/instance/compute: no name or no location", answered=True)
        self._machine = name
        return Identity(
            instance=name,
            zone=f"{location}-{zone}" if isinstance(zone, str) and zone else location,
            cloud=self.name,
        )

    def poll(self, stop: Event) -> Sequence[Notice]:
        """The events of this machine. Raises MetadataError when its name or the events can't be read."""
        machine = self._machine or self.identify(stop, timeout_seconds=self._timeout_seconds).instance
        answer = self._get(_EVENTS, stop, self._events_seconds)
        what = "GET /metadata/scheduledevents: the answer"
        events = answer.json_object(what).get("Events")
        if not isinstance(events, list):
            raise MetadataError(f"{what} has no list of events", answered=True)
        self._events_seconds = self._timeout_seconds
        notices = [_notice(event, machine, answer) for event in events if isinstance(event, dict)]
        return [notice for notice in notices if notice is not None]

    def _get(self, path: str, stop: Event, timeout_seconds: float) -> Answer:
        answer = self._client.ask(path, stop=stop, timeout_seconds=timeout_seconds, headers={"Metadata": "true"})
        if answer.status != 200:
            raise MetadataError(f"GET {path.partition('?')[0]}: status {answer.status}", answered=True)
        return answer


def _notice(event: Mapping[str, Any], machine: str, answer: Answer) -> Notice | None:
    """The notice that an event means for ``machine``, if any."""
    sort, status, resources = event.get("EventType"), event.get("EventStatus"), event.get("Resources")
    if not isinstance(sort, str) or sort not in _KINDS or status not in ("Scheduled", "Started"):
        return None
    named = {name.casefold() for name in resources if isinstance(name, str)} if isinstance(resources, list) else set()
    if machine.casefold() not in named:
        return None
    reason = f"Azure event {event.get('EventId')} ({sort}, {status})"
    if status == "Started":
        return Notice(_KINDS[sort], answer.asked_at_seconds, reason, "azure")
    deadline = deadline_of(event.get("NotBefore"), answer, longest_seconds=_LONGEST_SECONDS)
    return Notice(_KINDS[sort], deadline, reason, "azure")
