"""A metadata service on loopback that answers as told, well or badly, and remembers what it was asked."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, urlsplit


@dataclass(frozen=True)
class Question:
    """``headers`` have lower-case names."""

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]


@dataclass(frozen=True)
class Reply:
    """``until``: answer only when it is set (or the server closes). ``missing_bytes``: break off that early.

    ``raw``: these bytes instead of HTTP. ``trickle``: one byte at a time until the server closes, never an end.
    """

    text: str = ""
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    until: threading.Event | None = None
    missing_bytes: int = 0
    raw: bytes | None = None
    trickle: bool = False


Answering = Reply | Callable[[Question], Reply]


class FakeMetadata:
    """``routes``: "GET /path" (without query) -> a Reply or a function; ``default`` for the rest, 404 at first."""

    def __init__(self, routes: Mapping[str, Answering] | None = None) -> None:
        self.routes: dict[str, Answering] = dict(routes or {})
        self.default: Answering = Reply("not here", 404)
        self.date: str | None = None  # what "Date" says; None: nothing
        self.questions: list[Question] = []
        self.asked = threading.Condition()
        self.closed = threading.Event()
        self._server = _server_for(self)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    @property
    def url(self) -> str:
        """Where it is."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> FakeMetadata:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.closed.set()
        self._server.shutdown()
        self._server.server_close()

    def note(self, question: Question) -> None:
        """Remember what was asked. For the server's own threads."""
        with self.asked:
            self.questions.append(question)
            self.asked.notify_all()

    def wait_for(self, count: int, path: str, *, within_seconds: float = 10.0) -> list[Question]:
        """Wait until ``path`` was asked ``count`` times; return those questions. Raises TimeoutError."""

        def found() -> list[Question]:
            return [question for question in self.questions if question.path == path]

        with self.asked:
            if not self.asked.wait_for(lambda: len(found()) >= count, within_seconds):
                raise TimeoutError(f"{path} was asked {len(found())} times within {within_seconds:g} s, not {count}")
            return found()


def _server_for(fake: FakeMetadata) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer()

        def do_PUT(self) -> None:
            self._answer()

        def _answer(self) -> None:
            parts = urlsplit(self.path)
            query = {name: values[0] for name, values in parse_qs(parts.query).items()}
            headers = {name.lower(): value for name, value in self.headers.items()}
            question = Question(self.command, parts.path, query, headers)
            fake.note(question)
            answering = fake.routes.get(f"{self.command} {parts.path}", fake.default)
            reply = answering(question) if callable(answering) else answering
            _wait(reply.until, fake.closed)
            try:
                self._send(reply)
            except OSError:
                self.close_connection = True  # the other side has given up

        def _send(self, reply: Reply) -> None:
            if reply.raw is not None:
                self.wfile.write(reply.raw)
                self.close_connection = True
                return
            body = reply.text.encode()
            self.send_response_only(reply.status)
            if fake.date is not None:
                self.send_header("Date", fake.date)
            for name, value in reply.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(100_000 if reply.trickle else len(body)))
            self.end_headers()
            self.wfile.write(body[: len(body) - reply.missing_bytes])
            self.wfile.flush()
            while reply.trickle and not fake.closed.wait(0.05):
                self.wfile.write(b" ")
            self.close_connection = self.close_connection or bool(reply.missing_bytes)

        def log_message(self, format: str, *args: Any) -> None:
            """Tests stay silent."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.block_on_close = False
    return server


def _wait(event: threading.Event | None, closed: threading.Event) -> None:
    while event is not None and not event.wait(0.02) and not closed.is_set():
        pass
