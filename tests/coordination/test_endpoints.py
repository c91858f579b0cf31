"""What users write for an endpoint, and what they are told."""

from __future__ import annotations

import pytest

from deepspeed_bamboo.coordination.endpoints import Endpoint, parse_endpoints
from deepspeed_bamboo.coordination.errors import EndpointError


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("10.0.0.1:2379", "10.0.0.1", 2379),
        (" etcd-0.etcd.svc:2379 ", "etcd-0.etcd.svc", 2379),
        ("[::1]:1", "[::1]", 1),
        ("h:65535", "h", 65535),
    ],
)
def test_well_formed(text: str, host: str, port: int) -> None:
    assert Endpoint.parse(text) == Endpoint(host, port)
    assert str(Endpoint.parse(text)) == text.strip()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("http://x:2379", "endpoint 'http://x:2379' has a scheme; endpoints are host:port, so write 'x:2379'"),
        ("https://x:2379/", "so write 'x:2379'"),
        ("x", "endpoint 'x' has no port; write host:port, for example x:2379"),
        (":2379", "has no port"),
        ("", "has no port"),
        ("x:", "has port ''; a port is a number from 1 to 65535"),
        ("x:http", "has port 'http'"),
        ("x:0", "has port '0'"),
        ("x:65536", "has port '65536'"),
        ("::1:2379", "put it in brackets"),
        ("x y:2379", "no host name"),
    ],
)
def test_malformed(text: str, message: str) -> None:
    with pytest.raises(EndpointError) as raised:
        Endpoint.parse(text)
    assert message in str(raised.value)


def test_a_list_keeps_its_order_without_repetitions() -> None:
    assert [str(e) for e in parse_endpoints(["b:2", "a:1", "b:2"])] == ["b:2", "a:1"]
    with pytest.raises(EndpointError, match="at least one"):
        parse_endpoints([])
