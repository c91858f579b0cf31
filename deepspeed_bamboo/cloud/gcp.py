"""Google Compute Engine: the metadata server, which can hold an answer back until there is news."""

from __future__ import annotations

import re
import time
import urllib.parse
from collections.abc import Sequence
from threading import Event

from deepspeed_bamboo.cloud.errors import MetadataError
from deepspeed_bamboo.cloud.metadata_http import Answer, MetadataClient
from deepspeed_bamboo.cloud.notice import Identity, Notice, NoticeKind

BASE_URL = "http://169.254.169.254"

_INSTANCE = "/computeMetadata/v1/instance"
_PREEMPTED = f"{_INSTANCE}/preempted"
_MAINTENANCE = f"{_INSTANCE}/maintenance-event"

_PREEMPTION_SECONDS = 30.0  # between the news and the end, as documented
_MAINTENANCE_SECONDS = 60.0  # at least; machines with GPUs may get an hour
_MAINTENANCE_EVENTS = ("NONE", "MIGRATE_ON_HOST_MAINTENANCE", "TERMINATE_ON_HOST_MAINTENANCE")


class GcpMetadata:
    """Preemptions, seen at once (``wait_for_change``), and host maintenance that stops the machine.

    A live migration is no notice: the machine lives on. The server gives no times, so deadlines count
    from when this process first saw the news, kept as long as the news holds.
    """

    name = "gcp"
    interval_seconds = 1.0

    def __init__(self, *, base_url: str = BASE_URL, timeout_seconds: float = 5.0, hold_seconds: float = 10.0) -> None:
        """``hold_seconds``: how long the server may wait for news about a preemption; maintenance is asked as often.

        ``timeout_seconds`` is the limit of a question beyond that. Raises ConfigError for a wrong address.
        """
        self._client = MetadataClient(base_url)
        self._timeout_seconds = timeout_seconds
        self._hold_seconds = hold_seconds
        self._etag: str | None = None
        self._holding: dict[str, Notice] = {}

    def identify(self, stop: Event, *, timeout_seconds: float) -> Identity:
        """Instance number and zone. Raises MetadataError when this isn't GCE or doesn't answer."""
        zone = self._get(f"{_INSTANCE}/zone", stop, timeout_seconds).text.strip()
        found = re.fullmatch(r"projects/[^/]+/zones/([a-z0-9-]{1,63})", zone)
        if found is None:
            raise MetadataError(f"GET {_INSTANCE}/zone: the answer is no zone", answered=True)
        instance = self._get(f"{_INSTANCE}/id", stop, timeout_seconds).text.strip()
        if not re.fullmatch(r"[0-9]{1,30}", instance):
            raise MetadataError(f"GET {_INSTANCE}/id: the answer is no number", answered=True)
        return Identity(instance=instance, zone=found[1], cloud=self.name)

    def poll(self, stop: Event) -> Sequence[Notice]:
        """Ask about maintenance, then wait for news of a preemption. One without an answer does not hide the other."""
        failures = []
        for question in (self._ask_maintenance, self._ask_preemption):
            try:
                question(stop)
            except MetadataError as error:
                failures.append(error)
        if failures and not self._holding:
            raise failures[0]
        return list(self._holding.values())

    def _ask_maintenance(self, stop: Event) -> None:
        event = self._get(_MAINTENANCE, stop, self._timeout_seconds, absent="NONE").text.strip()
        if event not in _MAINTENANCE_EVENTS:
            raise MetadataError(f"GET {_MAINTENANCE}: the answer is no maintenance event", answered=True)
        news = event == "TERMINATE_ON_HOST_MAINTENANCE"
        self._hold("maintenance", news, "the machine will be stopped for host maintenance", _MAINTENANCE_SECONDS)

    def _ask_preemption(self, stop: Event) -> None:
        path, timeout_seconds = _PREEMPTED, self._timeout_seconds
        if self._etag is not None and not self._holding:
            held = max(1, round(self._hold_seconds))
            query = {"wait_for_change": "true", "last_etag": self._etag, "timeout_sec": held}
            path, timeout_seconds = f"{path}?{urllib.parse.urlencode(query)}", timeout_seconds + held
        self._etag = None  # after a failure, ask plainly: something may have been missed
        answer = self._get(path, stop, timeout_seconds, absent="FALSE")
        preempted = answer.text.strip()
        if preempted not in ("TRUE", "FALSE"):
            raise MetadataError(f"GET {_PREEMPTED}: the answer is neither TRUE nor FALSE", answered=True)
        self._etag = answer.headers.get("etag")
        self._hold("preemption", preempted == "TRUE", "the machine is being preempted", _PREEMPTION_SECONDS)

    def _hold(self, kind: NoticeKind, news: bool, reason: str, seconds: float) -> None:
        if not news:
            self._holding.pop(kind, None)
        elif kind not in self._holding:
            self._holding[kind] = Notice(kind, time.monotonic() + seconds, reason, self.name)

    def _get(self, path: str, stop: Event, timeout_seconds: float, *, absent: str | None = None) -> Answer:
        """``absent``: what a 404 means, for keys that some machines don't have."""
        answer = self._client.ask(
            path, stop=stop, timeout_seconds=timeout_seconds, headers={"Metadata-Flavor": "Google"}
        )
        where = f"GET {path.partition('?')[0]}"
        if answer.headers.get("metadata-flavor") != "Google":
            raise MetadataError(f"{where}: something answers that isn't Google's server", answered=True)
        if answer.status == 404 and absent is not None:
            return Answer(200, {}, absent, answer.asked_at_seconds)
        if answer.status != 200:
            raise MetadataError(f"{where}: status {answer.status}", answered=True)
        return answer
