"""One question: bounded in time and size, stoppable, straight to the service."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from deepspeed_bamboo.cloud.errors import MetadataError
from deepspeed_bamboo.cloud.metadata_http import MetadataClient
from deepspeed_bamboo.errors import ConfigError
from deepspeed_bamboo.testing.fake_metadata import FakeMetadata, Reply

STOP = threading.Event()


def ask(fake: FakeMetadata, *, timeout_seconds: float = 2.0) -> str:
    return MetadataClient(fake.url).ask("/x", stop=STOP, timeout_seconds=timeout_seconds).text


def test_proxies_in_the_environment_are_bypassed(fake: FakeMetadata) -> None:
    """They are set for every test (conftest)."""
    fake.default = Reply("straight")
    assert ask(fake) == "straight"


def test_redirects_are_not_followed(fake: FakeMetadata) -> None:
    fake.default = Reply(status=302, headers={"Location": "/y"})
    assert MetadataClient(fake.url).ask("/x", stop=STOP, timeout_seconds=2).status == 302
    assert [question.path for question in fake.questions] == ["/x"]


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (Reply("abc", missing_bytes=1), "breaks off"),
        (Reply("x" * 300_000), "longer than 256 KiB"),
        (Reply(raw=b"\x00\x01 hello\r\n\r\n"), "no HTTP"),
        (Reply(raw=b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\nX"), None),
        (Reply(raw=b""), "no HTTP|reset|RemoteDisconnected"),
        (Reply(raw=b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 200 + b"\r\n"), "no HTTP"),
    ],
)
def test_what_is_no_answer(fake: FakeMetadata, reply: Reply, message: str | None) -> None:
    fake.default = reply
    if message is None:
        assert ask(fake) == ""
        return
    with pytest.raises(MetadataError, match=message):
        ask(fake)


def test_bytes_that_are_no_text_do_no_harm(fake: FakeMetadata) -> None:
    fake.default = Reply(raw=b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n\xff\xfe")
    assert ask(fake) == "��"


@pytest.mark.parametrize("reply", [Reply(trickle=True), "silent"], ids=["trickle", "silent"])
def test_the_time_limit_is_for_the_whole_answer(fake: FakeMetadata, reply: Reply | str) -> None:
    fake.default = Reply(until=fake.closed) if isinstance(reply, str) else reply
    began = time.monotonic()
    with pytest.raises(MetadataError, match=r"no answer within 0\.3 s"):
        ask(fake, timeout_seconds=0.3)
    assert time.monotonic() - began < 1.5


def test_stopping_ends_a_waiting_question(fake: FakeMetadata) -> None:
    fake.default = Reply(until=fake.closed)
    stop = threading.Event()
    ended = threading.Event()

    def wait() -> None:
        with pytest.raises(MetadataError):
            MetadataClient(fake.url).ask("/x", stop=stop, timeout_seconds=60)
        ended.set()

    threading.Thread(target=wait, daemon=True).start()
    fake.wait_for(1, "/x")
    stop.set()
    assert ended.wait(1.0)


def test_connection_refused_says_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(MetadataError, match="Connection refused") as caught:
        MetadataClient(f"http://127.0.0.1:{port}").ask("/x", stop=STOP, timeout_seconds=2)
    assert not caught.value.answered


@pytest.mark.parametrize(
    "url", ["", "169.254.169.254", "https://host", "http://", "http://host/latest", "http://host:port", "http://[::1"]
)
def test_addresses_that_cannot_be_used(url: str) -> None:
    with pytest.raises(ConfigError, match=r"http://host:port"):
        MetadataClient(url)
