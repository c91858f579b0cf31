"""The fake service dressed as each cloud, and a place where notices arrive."""

from __future__ import annotations

import json
import threading
from typing import Any

from deepspeed_bamboo.cloud.notice import Notice
from deepspeed_bamboo.testing.fake_aws import HTML
from deepspeed_bamboo.testing.fake_metadata import FakeMetadata, Question, Reply

GCP = "/computeMetadata/v1/instance"
GOOGLE = {"Metadata-Flavor": "Google"}

AZURE_COMPUTE = "/metadata/instance/compute"
AZURE_EVENTS = "/metadata/scheduledevents"


class Arrivals:
    """Takes notices, and waits for them."""

    def __init__(self) -> None:
        self.notices: list[Notice] = []
        self._news = threading.Condition()

    def __call__(self, notice: Notice) -> None:
        with self._news:
            self.notices.append(notice)
            self._news.notify_all()

    def wait_for(self, count: int, *, within_seconds: float = 10.0) -> list[Notice]:
        with self._news:
            assert self._news.wait_for(lambda: len(self.notices) >= count, within_seconds), self.notices
            return list(self.notices)


def as_gcp(fake: FakeMetadata) -> None:
    def serve(question: Question) -> Reply:
        if question.headers.get("metadata-flavor") != "Google":
            return Reply(HTML, 403)
        return Reply("absent", 404, GOOGLE)

    fake.default = serve
    fake.routes[f"GET {GCP}/zone"] = Reply("projects/12345/zones/us-central1-a", headers=GOOGLE)
    fake.routes[f"GET {GCP}/id"] = Reply("4520031799277581759", headers=GOOGLE)
    fake.routes[f"GET {GCP}/preempted"] = Reply("FALSE", headers=GOOGLE)
    fake.routes[f"GET {GCP}/maintenance-event"] = Reply("NONE", headers=GOOGLE)


def as_azure(fake: FakeMetadata, *events: dict[str, Any], name: str = "spot_7", zone: str = "2") -> None:
    compute = {"name": name, "location": "westeurope", "zone": zone, "vmId": "5c08b38e"}

    def serve(question: Question) -> Reply:
        if question.headers.get("metadata") != "true" or "api-version" not in question.query:
            return Reply('{"error": "Bad request"}', 400)
        if question.path == AZURE_COMPUTE:
            return Reply(json.dumps(compute))
        if question.path == AZURE_EVENTS:
            return Reply(json.dumps({"DocumentIncarnation": 1, "Events": events}))
        return Reply("{}", 404)

    fake.default = serve


def azure_event(**changes: Any) -> dict[str, Any]:
    return {
        "EventId": "A123",
        "EventType": "Preempt",
        "ResourceType": "VirtualMachine",
        "Resources": ["spot_7"],
        "EventStatus": "Scheduled",
        "NotBefore": "Mon, 11 Apr 2022 22:26:58 GMT",
        "DurationInSeconds": -1,
        "EventSource": "Platform",
        **changes,
    }
