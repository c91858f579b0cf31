"""The fake service dressed as each cloud, and a place where notices arrive."""

from __future__ import annotations

import json
import threading
from typing import Any

from deepspeed_bamboo.cloud.notice import Notice
from tests.cloud.fake_metadata import FakeMetadata, Question, Reply

AWS_TOKEN = "/latest/api/token"
AWS_ZONE = "/latest/meta-data/placement/availability-zone"
AWS_INSTANCE = "/latest/meta-data/instance-id"
AWS_ACTION = "/latest/meta-data/spot/instance-action"
AWS_REBALANCE = "/latest/meta-data/events/recommendations/rebalance"

GCP = "/computeMetadata/v1/instance"
GOOGLE = {"Metadata-Flavor": "Google"}

AZURE_COMPUTE = "/metadata/instance/compute"
AZURE_EVENTS = "/metadata/scheduledevents"

HTML = "<html><body>Welcome to the hotel</body></html>"


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


class Tokens:
    """The token side of IMDSv2: gives out tokens, knows which is valid, refuses everything without it."""

    def __init__(self, fake: FakeMetadata) -> None:
        self.given = 0
        self.valid = True
        self._fake = fake
        self._pages: dict[str, Reply] = {}
        fake.routes[f"PUT {AWS_TOKEN}"] = self._give
        fake.default = self._serve

    def page(self, path: str, reply: Reply) -> None:
        self._pages[path] = reply

    def expire(self) -> None:
        """The token that was given last is worth nothing any more."""
        self.valid = False

    def _give(self, question: Question) -> Reply:
        if not question.headers.get("x-aws-ec2-metadata-token-ttl-seconds", "").isdigit():
            return Reply("bad", 400)
        self.given += 1
        self.valid = True
        return Reply(f"token-{self.given}==")

    def _serve(self, question: Question) -> Reply:
        if not self.valid or question.headers.get("x-aws-ec2-metadata-token") != f"token-{self.given}==":
            return Reply("", 401)
        return self._pages.get(question.path, Reply(HTML, 404))


def as_aws(fake: FakeMetadata) -> Tokens:
    tokens = Tokens(fake)
    tokens.page(AWS_ZONE, Reply("us-east-1b"))
    tokens.page(AWS_INSTANCE, Reply("i-0123456789abcdef0"))
    return tokens


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
