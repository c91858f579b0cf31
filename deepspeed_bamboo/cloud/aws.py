"""Amazon EC2: the instance metadata service, version 2 (session tokens)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from threading import Event

from deepspeed_bamboo.cloud.errors import MetadataError
from deepspeed_bamboo.cloud.metadata_http import Answer, MetadataClient
from deepspeed_bamboo.cloud.notice import Identity, Notice
from deepspeed_bamboo.cloud.timestamps import deadline_of

BASE_URL = "http://169.254.169.254"

_TOKEN = "/latest/api/token"
_ACTION = "/latest/meta-data/spot/instance-action"
_REBALANCE = "/latest/meta-data/events/recommendations/rebalance"
_ZONE = "/latest/meta-data/placement/availability-zone"
_INSTANCE = "/latest/meta-data/instance-id"

_TOKEN_LIFE_SECONDS = 21600
_NOTICE_SECONDS = 120.0  # the longest warning that EC2 gives before it takes a spot instance
_ACTIONS = {"terminate": "terminated", "stop": "stopped", "hibernate": "hibernated"}
_REMEDY = "in a container: raise HttpPutResponseHopLimit of the instance to 2, or set BAMBOO_ZONE"


class AwsMetadata:
    """Spot interruptions (``preemption``) and rebalance recommendations (``rebalance``).

    A token is fetched when there is none and again when one is refused. Where the PUT for it gets no
    answer (hop limit 1 in a container) or isn't known, questions go without a token, which version 1
    answers and version 2 refuses with 401.
    """

    name = "aws"
    interval_seconds = 5.0  # what EC2 recommends

    def __init__(self, *, base_url: str = BASE_URL, timeout_seconds: float = 5.0) -> None:
        """``timeout_seconds`` is the limit of each question of :meth:`poll`. Raises ConfigError for a wrong address."""
        self._client = MetadataClient(base_url)
        self._timeout_seconds = timeout_seconds
        self._token: str | None = None
        self._without_token = False
        self._holding: dict[str, Notice] = {}

    def identify(self, stop: Event, *, timeout_seconds: float) -> Identity:
        """Instance and availability zone. Raises MetadataError when this isn't EC2 or doesn't answer."""
        zone = self._text(_ZONE, r"[a-z]{2,}-[a-z0-9-]{1,60}", stop, timeout_seconds)
        instance = self._text(_INSTANCE, r"i-[0-9a-f]{1,60}", stop, timeout_seconds)
        return Identity(instance=instance, zone=zone, cloud=self.name)

    def poll(self, stop: Event) -> Sequence[Notice]:
        """Both kinds of notice; the last answer counts while a question gets none.

        Raises MetadataError for such a question when there is no notice at all.
        """
        failure: MetadataError | None = None
        readings: Sequence[tuple[str, Callable[[Answer], Notice]]] = (
            (_ACTION, _interruption),
            (_REBALANCE, _rebalance),
        )
        for path, read in readings:
            try:
                answer = self._get(path, stop, self._timeout_seconds)
                if answer.status == 404:
                    self._holding.pop(path, None)
                else:
                    _check_status(path, answer)
                    self._holding[path] = read(answer)
            except MetadataError as error:
                failure = failure or error
        if failure is not None and not self._holding:
            raise failure
        return list(self._holding.values())

    def _text(self, path: str, pattern: str, stop: Event, timeout_seconds: float) -> str:
        answer = self._get(path, stop, timeout_seconds)
        _check_status(path, answer)
        if not re.fullmatch(pattern, answer.text.strip()):
            raise MetadataError(f"GET {path}: the answer is not one of EC2's", answered=True)
        return answer.text.strip()

    def _get(self, path: str, stop: Event, timeout_seconds: float) -> Answer:
        """Ask with a token, which is renewed once if it is refused."""
        problem = ""
        if self._token is None and not self._without_token:
            problem = self._renew(stop, timeout_seconds)
        answer = self._client.ask(path, stop=stop, timeout_seconds=timeout_seconds, headers=self._headers())
        if answer.status == 401 and not problem:
            problem = self._renew(stop, timeout_seconds)
            if not problem:
                answer = self._client.ask(path, stop=stop, timeout_seconds=timeout_seconds, headers=self._headers())
        if answer.status == 401:
            self._token, self._without_token = None, False
            cause = problem or "a fresh token is refused too"
            raise MetadataError(f"GET {path}: 401, and {cause}; {_REMEDY}", answered=True)
        return answer

    def _headers(self) -> Mapping[str, str]:
        return {} if self._token is None else {"X-aws-ec2-metadata-token": self._token}

    def _renew(self, stop: Event, timeout_seconds: float) -> str:
        """Fetch a token. Return why there is none, or an empty text."""
        self._token = None
        try:
            answer = self._client.ask(
                _TOKEN,
                stop=stop,
                timeout_seconds=timeout_seconds,
                method="PUT",
                headers={"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_LIFE_SECONDS)},
            )
        except MetadataError as error:
            self._without_token = True
            return str(error)
        if answer.status == 200 and re.fullmatch(r"[!-~]{1,1024}", answer.text.strip()):
            self._token, self._without_token = answer.text.strip(), False
            return ""
        self._without_token = True
        return f"PUT {_TOKEN}: status {answer.status} and no token"


def _check_status(path: str, answer: Answer) -> None:
    if answer.status != 200:
        raise MetadataError(f"GET {path}: status {answer.status}", answered=True)


def _interruption(answer: Answer) -> Notice:
    value = answer.json_object(f"GET {_ACTION}: the answer")
    action, moment = value.get("action"), value.get("time")
    if not isinstance(action, str) or action not in _ACTIONS:
        raise MetadataError(f"GET {_ACTION}: no action that EC2 knows", answered=True)
    deadline = deadline_of(moment, answer, longest_seconds=_NOTICE_SECONDS)
    when = f"at {moment}" if deadline is not None else "at a time that can't be read"
    return Notice("preemption", deadline, f"the spot instance will be {_ACTIONS[action]} {when}", "aws")


def _rebalance(answer: Answer) -> Notice:
    value = answer.json_object(f"GET {_REBALANCE}: the answer")
    if not isinstance(value.get("noticeTime"), str):
        raise MetadataError(f"GET {_REBALANCE}: no noticeTime", answered=True)
    return Notice("rebalance", None, f"EC2 recommended to rebalance at {value['noticeTime']}", "aws")
