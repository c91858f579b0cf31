"""The metadata service of an EC2 instance, as :class:`FakeMetadata` plays it."""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone

from deepspeed_bamboo.testing.fake_metadata import FakeMetadata, Question, Reply

AWS_TOKEN = "/latest/api/token"
AWS_ZONE = "/latest/meta-data/placement/availability-zone"
AWS_INSTANCE = "/latest/meta-data/instance-id"
AWS_ACTION = "/latest/meta-data/spot/instance-action"
AWS_REBALANCE = "/latest/meta-data/events/recommendations/rebalance"

HTML = "<html><body>Welcome to the hotel</body></html>"


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
        """Answer ``reply`` at ``path`` from now on."""
        self._pages[path] = reply

    def take(self, *, after_seconds: float) -> None:
        """Give notice that the instance is terminated then. EC2 names whole seconds."""
        moment = datetime.now(timezone.utc) + timedelta(seconds=after_seconds)
        self.page(AWS_ACTION, Reply(json.dumps({"action": "terminate", "time": f"{moment:%Y-%m-%dT%H:%M:%SZ}"})))

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


def as_aws(fake: FakeMetadata, *, instance: str = "i-0123456789abcdef0", zone: str = "us-east-1b") -> Tokens:
    """Dress ``fake`` as that of an instance that nobody takes yet."""
    tokens = Tokens(fake)
    tokens.page(AWS_ZONE, Reply(zone))
    tokens.page(AWS_INSTANCE, Reply(instance))
    return tokens
