"""One fake service a test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from deepspeed_bamboo.testing.fake_metadata import FakeMetadata


@pytest.fixture
def fake() -> Iterator[FakeMetadata]:
    with FakeMetadata() as server:
        yield server


@pytest.fixture(autouse=True)
def proxies_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test runs with proxies that lead nowhere: none of them may be used."""
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
