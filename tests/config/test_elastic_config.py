"""The parts of the section about machines that come and go: what is refused, and with which words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deepspeed_bamboo.config.section import parse_bamboo_section
from deepspeed_bamboo.errors import ConfigError

ETCD = {"endpoints": ["etcd:2379"]}


def test_defaults() -> None:
    config = parse_bamboo_section({})
    assert (config.topology.max_restarts, config.topology.restart_seconds) == (3, 5.0)
    notices = config.notices
    assert (notices.source, notices.sigterm, notices.rebalance, notices.grace_seconds) == ("auto", "abort", "tell", 30)


@pytest.mark.parametrize(
    "section",
    [
        {"coordinator": {**ETCD, "username": "u", "password_env": "ETCD_PASSWORD", "ca_cert": "ca.pem"}},
        {"coordinator": {**ETCD, "ca_cert": Path("ca.pem"), "cert": "c.pem", "key": "k.pem"}},
        {"topology": {"max_restarts": 0, "restart_seconds": 0.5}},
        {"notices": {"source": "aws", "base_url": "http://127.0.0.1:8080", "poll_seconds": 1.0}},
        {"notices": {"source": "scripted", "script": [{"after_seconds": 1, "seconds": 5}]}},
        {"notices": {"source": "scripted", "script": "notices.json"}},
    ],
)
def test_what_is_taken(section: dict[str, Any]) -> None:
    parse_bamboo_section(section)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"coordinator": {"username": "u", "password_env": "P"}}, "username .* name it in endpoints"),
        ({"coordinator": {**ETCD, "username": "u"}}, "username and password_env go together"),
        ({"coordinator": {**ETCD, "password_env": "P"}}, "username and password_env go together"),
        ({"coordinator": {**ETCD, "username": "u", "password_env": "s3 cret!"}}, "name the environment variable"),
        ({"coordinator": {**ETCD, "cert": "c"}}, "cert and key go together"),
        ({"coordinator": {**ETCD, "cert": "c", "key": "k"}}, "cert needs ca_cert"),
        ({"coordinator": {**ETCD, "password": "x"}}, "unknown key bamboo.coordinator.password.*password_env"),
        ({"topology": {"max_restarts": -1}}, "max_restarts: -1"),
        ({"topology": {"restart_seconds": 0}}, "restart_seconds: 0"),
        ({"notices": {"source": "awz"}}, "aws"),
        ({"notices": {"base_url": "http://x"}}, "set source to aws, gcp or azure"),
        ({"notices": {"source": "aws", "base_url": "x"}}, "base_url: 'x'"),
        ({"notices": {"source": "scripted"}}, "script and source: scripted go together"),
        ({"notices": {"source": "scripted", "script": [{"seconds": 1}]}}, "exactly one of after_seconds and at_event"),
        ({"notices": {"sigterm": "ignore"}}, "abort"),
    ],
)
def test_what_is_refused(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_bamboo_section(section)
