"""Under which address a worker is reached."""

from __future__ import annotations

import socket

import pytest

from deepspeed_bamboo.elastic import address
from deepspeed_bamboo.elastic.address import advertised_address, gloo_interface


def test_what_the_user_says_counts() -> None:
    found = advertised_address({"BAMBOO_ADDRESS": "10.1.2.3"}, master_addr="127.0.0.1", endpoints=["127.0.0.1:1"])
    assert found == "10.1.2.3"


def test_on_one_machine_it_is_loopback() -> None:
    assert advertised_address({}, master_addr="127.0.0.1", endpoints=["127.0.0.1:2379"]) == "127.0.0.1"
    assert advertised_address({}, master_addr="no-such-host.invalid", endpoints=["[::1]:2379"]) == "127.0.0.1"


def test_it_is_the_interface_towards_the_master_else_towards_the_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    ways = {"127.0.0.1": "127.0.0.1", "10.0.0.1": "10.0.0.9", "fd00::1": "fd00::9"}
    monkeypatch.setattr(address, "_interface_to", lambda host: ways.get(host, ""))
    assert advertised_address({}, master_addr="10.0.0.1", endpoints=["[fd00::1]:2379"]) == "10.0.0.9"
    assert advertised_address({}, master_addr="127.0.0.1", endpoints=["lost:2379", "[fd00::1]:2379"]) == "fd00::9"


def test_the_routing_table_is_asked_and_nobody_else() -> None:
    own = address._interface_to("127.0.0.5")
    assert own.startswith("127.")
    with socket.socket() as probe:
        probe.bind((own, 0))


def test_gloo_uses_the_interface_with_that_address_unless_told_otherwise() -> None:
    assert gloo_interface({}, "127.0.0.1") == {"GLOO_SOCKET_IFNAME": "lo"}
    assert gloo_interface({"GLOO_SOCKET_IFNAME": "eth7"}, "127.0.0.1") == {}
    assert gloo_interface({}, "192.0.2.255") == {}
