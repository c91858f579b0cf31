"""Something that one process of this user on this machine has at a time, whatever becomes of that process."""

from __future__ import annotations

import errno
import hashlib
import os
import socket
import time

_AGAIN_SECONDS = 0.05


class MachineToken:
    """The token called ``names``. It is a name in the kernel's abstract socket namespace.

    So there is no file that a dead process could leave behind: the token is free again once its holder has ended.
    """

    def __init__(self, *names: str) -> None:
        digest = hashlib.sha256("\0".join((str(os.getuid()), *names)).encode()).hexdigest()[:32]
        self._name = f"\0bamboo-token-{digest}"
        self._held: socket.socket | None = None

    def take(self, *, within_seconds: float = 0.0) -> bool:
        """Whether this object has the token now; waits for another holder that long. True where none can be had."""
        deadline = time.monotonic() + within_seconds
        while not self._try():
            if time.monotonic() >= deadline:
                return False
            time.sleep(_AGAIN_SECONDS)
        return True

    def release(self) -> None:
        """Let another have it."""
        if self._held is not None:
            self._held.close()
            self._held = None

    def _try(self) -> bool:
        if self._held is not None:
            return True
        token = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            token.bind(self._name)
        except OSError as error:
            token.close()
            return error.errno != errno.EADDRINUSE
        self._held = token
        return True
