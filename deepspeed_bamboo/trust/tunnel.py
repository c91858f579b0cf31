"""How other machines reach what listens on a Unix socket of this one: a gate there, and a tunnel here.

etcd knows passwords, but answers much without one (leases, its metrics). So a job's own etcd listens on a Unix
socket only, in a folder of its user. For other machines a gate takes TCP connections that know the job secret, and
passes them on; a tunnel is a Unix socket on such a machine that leads to the gate. What goes between tunnel and gate is
encrypted, with a certificate that the gate makes and the tunnel must have got from somebody it trusts.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import socket
import ssl
import tempfile
import threading
from pathlib import Path

from deepspeed_bamboo.trust.certificate import own_certificate, trusting
from deepspeed_bamboo.trust.handshake import StrangerError
from deepspeed_bamboo.trust.relay import relay
from deepspeed_bamboo.trust.server import GuardedServer, connect

logger = logging.getLogger(__name__)
_PURPOSE = "etcd"
FOLDER_PREFIX = "bamboo-tunnel-"


class Gate:
    """Leads those who know ``secret`` from a TCP port of ``host`` to the Unix socket ``target``.

    ``certificate`` is public, and what they must know, too.
    """

    def __init__(self, host: str, *, target: Path, secret: str) -> None:
        self._target = target
        self.certificate, encryption = own_certificate()
        self._server = GuardedServer(host, 0, secret=secret, purpose=_PURPOSE, serve=self._lead, encryption=encryption)
        self.host, self.port = self._server.host, self._server.port

    def close(self) -> None:
        self._server.close()

    def _lead(self, connection: socket.socket) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as inner:
            inner.connect(str(self._target))
            relay(connection, inner)


class Tunnel:
    """A Unix socket ``path``, in a folder that only this user can enter, which leads to a :class:`Gate`."""

    def __init__(self, host: str, port: int, *, secret: str, certificate: str) -> None:
        """Nothing is connected before somebody uses it, and then nobody who has another ``certificate`` (PEM).

        Raises OSError where there is no place for the socket, MessageError for what is no certificate.
        """
        self._host, self._port, self._secret = host, port, secret
        self._encryption = trusting(certificate)
        self._warned = False
        self._folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))
        self.path = self._folder / "etcd"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(self.path))
        self._listener.listen(64)
        threading.Thread(target=self._accept, name="bamboo-tunnel", daemon=True).start()

    def close(self) -> None:
        """Listen no more; connections that there are go on until their ends close them."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _accept(self) -> None:
        while True:
            try:
                inner, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._lead, args=(inner,), name="bamboo-tunnel-end", daemon=True).start()

    def _lead(self, inner: socket.socket) -> None:
        with inner:
            try:
                outer = connect(
                    self._host, self._port, secret=self._secret, purpose=_PURPOSE, encryption=self._encryption
                )
            except (StrangerError, ssl.SSLCertVerificationError) as error:
                # Said once: whoever uses the tunnel tries again and again.
                level, self._warned = logging.INFO if self._warned else logging.WARNING, True
                logger.log(level, "not this job's etcd is at %s:%d: %s", self._host, self._port, error)
                return
            except OSError as error:
                logger.info("the etcd at %s:%d can't be reached: %s", self._host, self._port, error)
                return
            with outer:
                relay(inner, outer)
