"""A job's own etcd: started on the first machine, and reached from the others through a gate and tunnels."""

from __future__ import annotations

import contextlib
from pathlib import Path

from deepspeed_bamboo.coordination.endpoints import Endpoint
from deepspeed_bamboo.coordination.server import PrivateEtcd
from deepspeed_bamboo.elastic.boot import Boot
from deepspeed_bamboo.trust.tunnel import Gate, Tunnel


def start_own_etcd(
    opened: contextlib.ExitStack, *, own: str, alone: bool, secret: str
) -> tuple[PrivateEtcd, tuple[str, ...], str]:
    """A running etcd, and where slots find it: its gate on address ``own``, and the gate's certificate.

    Where they are ``alone``, it is a Unix socket and needs no certificate.
    """
    server = opened.enter_context(PrivateEtcd())
    if alone:
        return server, (str(server.endpoint),), ""
    gate = Gate(own, target=Path(server.endpoint.host), secret=secret)
    opened.callback(gate.close)
    return server, (str(Endpoint(f"[{own}]" if ":" in own else own, gate.port)),), gate.certificate


def reached(boot: Boot, opened: contextlib.ExitStack) -> tuple[str, ...]:
    """Where a slot that was told ``boot`` finds the coordinator: another machine's etcd at the end of a tunnel."""
    server = Endpoint.parse(boot.endpoints[0])
    if not boot.host_pid or server.is_local:
        return boot.endpoints
    tunnel = Tunnel(server.host.strip("[]"), server.port, secret=boot.secret, certificate=boot.certificate)
    opened.callback(tunnel.close)
    return (str(Endpoint(str(tunnel.path), 0)),)
