"""One of several agents says what all of them know."""

from __future__ import annotations

import errno
import hashlib
import os
import socket


class FirstWord:
    """The right to speak for all agents of ``job`` on this machine: whoever takes it first has it until it ends.

    A name in the kernel's abstract socket namespace is the token, so nothing stays behind in whatever way it ends.
    """

    def __init__(self, job: str) -> None:
        digest = hashlib.sha256(f"{os.getuid()}/{job}".encode()).hexdigest()[:32]
        self._name = f"\0bamboo-first-word-{digest}"
        self._token: socket.socket | None = None

    def take(self) -> bool:
        """Whether this process is the one to speak; yes, too, where that can't be found out."""
        if self._token is not None:
            return True
        token = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            token.bind(self._name)
        except OSError as error:
            token.close()
            return error.errno != errno.EADDRINUSE
        self._token = token
        return True
