"""A token that one process of this user on this machine holds at a time; it is free when that process ends."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import socket
import struct
import time

logger = logging.getLogger(__name__)

_AGAIN_SECONDS = 0.05
_PLACES = 4
_BACKLOG = 4096
_LOOK_AGAIN = 100
_LISTENING_SECONDS = 0.1
_CREDENTIALS = struct.Struct("3i")  # process, user, group


class MachineToken:
    """The token called ``names``. It is a name in the kernel's abstract socket namespace.

    So there is no file that a dead process could leave behind: the token is free again once its holder has ended. The
    namespace is open to all users, so a name that another user holds is no token: there are several names, and the
    kernel says whose each is.
    """

    def __init__(self, *names: str) -> None:
        digest = hashlib.sha256("\0".join((str(os.getuid()), *names)).encode()).hexdigest()[:32]
        self._places = [f"\0bamboo-token-{digest}-{number}" for number in range(_PLACES)]
        self._strangers: set[str] = set()
        self._ours = 0  # how often the holder was one of this user
        self._held: socket.socket | None = None

    def take(self, *, within_seconds: float = 0.0) -> bool:
        """Whether this object has the token now; waits that long for another holder. True where tokens do not work."""
        deadline = time.monotonic() + within_seconds
        while not self._try():
            if time.monotonic() >= deadline:
                return False
            time.sleep(_AGAIN_SECONDS)
        return True

    def release(self) -> None:
        """Release it."""
        if self._held is not None:
            self._held.close()
            self._held = None

    def _try(self) -> bool:
        """Take the first name that no other user holds; none if one of this user holds any."""
        if self._held is not None:
            return True
        for place in self._places:
            token = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                token.bind(place)
                token.listen(_BACKLOG)
            except OSError as error:
                token.close()
                if error.errno != errno.EADDRINUSE:
                    return True
                if not self._is_strangers(place):
                    return False
                continue
            self._held = token
            return not self._is_held_elsewhere(place)
        return True

    def _is_held_elsewhere(self, own: str) -> bool:
        """Whether one of this user holds another name, which it took while a stranger had this one."""
        for place in self._places:
            if place != own and _holder(place) == os.getuid():
                self.release()
                return True
        return False

    def _is_strangers(self, place: str) -> bool:
        if place not in self._strangers:
            # Each look stays in the holder's backlog, which has room for so many.
            holder = os.getuid() if self._ours % _LOOK_AGAIN else _holder(place, patient=True)
            if holder == os.getuid():
                self._ours += 1
                return False
            self._strangers.add(place)
            whose = "another user" if holder is None else f"user {holder}"
            logger.warning("%s holds a name that this user's jobs use (%s); another one is taken", whose, place[1:])
        return True


def _holder(place: str, *, patient: bool = False) -> int | None:
    """The user whose process holds ``place``; None for nobody, and for one that does not listen as a holder does.

    ``patient``: somebody holds it, and may be about to listen.
    """
    deadline = time.monotonic() + (_LISTENING_SECONDS if patient else 0.0)
    while True:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            try:
                probe.connect(place)
                found = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
                return int(_CREDENTIALS.unpack(found)[1])
            except OSError:
                if time.monotonic() >= deadline:
                    return None
        time.sleep(_LISTENING_SECONDS / 20)
