"""Under which address a worker is reached."""

from __future__ import annotations

import socket

import pytest

from deepspeed_bamboo.elastic import address
from deepspeed_bamboo.elastic.address import advertised_address, check_own_address, interfaces_of, listening_address
from deepspeed_bamboo.elastic.errors import LaunchError


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


def test_gloo_and_on_loopback_nccl_use_the_interface_with_that_address_unless_told_otherwise() -> None:
    assert interfaces_of({}, "127.0.0.1") == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    assert interfaces_of({"GLOO_SOCKET_IFNAME": "eth7"}, "127.0.0.1") == {"NCCL_SOCKET_IFNAME": "lo"}
    assert interfaces_of({}, "192.0.2.255") == {}


def test_rank_0_listens_where_the_others_look_for_it_and_never_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"127.0.0.1": "127.0.0.1", "localhost": "127.0.0.1", "myself": "127.0.1.1", "first": "10.0.0.9"}
    names["service"] = "10.96.0.1"
    monkeypatch.setattr(address, "_resolved", lambda host, what="": names[host])
    monkeypatch.setattr(address, "_interface_to", lambda host: "10.0.0.9")
    monkeypatch.setattr(address, "own_addresses", lambda: frozenset({"127.0.0.1", "10.0.0.9"}))
    found = {name: listening_address(name, environment={}) for name in names}
    assert found == {
        "127.0.0.1": "127.0.0.1",
        "localhost": "127.0.0.1",
        "myself": "10.0.0.9",
        "first": "10.0.0.9",
        "service": "10.0.0.9",
    }
    assert listening_address("service", environment={"BAMBOO_ADDRESS": "10.0.0.8"}) == "10.0.0.8"


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("BAMBOO_ADDRESS", "192.0.2.7", r"BAMBOO_ADDRESS is '192.0.2.7', which is no address of this machine; it has "),
        ("BAMBOO_ADDRESS", "no such host", r"'no such host' cannot be resolved"),
        ("GLOO_SOCKET_IFNAME", "eth77", r"has no interface 'eth77'; it has .*lo"),
        ("NCCL_SOCKET_IFNAME", "eth77", r"has no interface 'eth77'"),
    ],
)
def test_what_the_user_says_of_this_machine_must_be_so(variable: str, value: str, said: str) -> None:
    with pytest.raises(LaunchError, match=said):
        check_own_address({variable: value})
    check_own_address({"BAMBOO_ADDRESS": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "^docker"})
