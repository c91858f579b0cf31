"""What the two sides of a channel say first, so that each knows the other for a worker of the same job.

Gloo asks nobody who he is. So each side puts a number used once into the store that the two share, which only workers
of the job can read, and says an HMAC over both numbers with the job secret as the first thing on the connection.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from typing import Any

from deepspeed_bamboo.trust.handshake import StrangerError

PASS_WORD_BYTES = 32


class PassWords:
    """Of one side of a pair. Nothing is waited for before :meth:`own`."""

    def __init__(self, store: Any, *, secret: str, first: bool) -> None:
        """``store``: under a prefix that only this pair uses, once."""
        self._store, self._secret, self._first = store, secret, first
        self._nonce = os.urandom(PASS_WORD_BYTES)
        self._their_nonce: bytes | None = None
        store.set(self._key(first), self._nonce.hex())

    def own(self) -> bytes:
        """What this side has to say; waits until the other side has put its number into the store."""
        return self._word(first=self._first)

    def check(self, heard: bytes, *, peer: str) -> None:
        """Raises StrangerError unless ``heard`` is what the other side has to say."""
        if not hmac.compare_digest(heard, self._word(first=not self._first)):
            raise StrangerError(f"whoever answers in the place of worker {peer} does not know the job's secret")

    def _word(self, *, first: bool) -> bytes:
        if self._their_nonce is None:
            self._their_nonce = bytes.fromhex(self._store.get(self._key(not self._first)).decode("ascii"))
        nonces = (self._nonce, self._their_nonce) if self._first else (self._their_nonce, self._nonce)
        text = b"bamboo channel" + (b"1" if first else b"2") + b"".join(nonces)
        return hmac.new(self._secret.encode(), text, hashlib.sha256).digest()

    @staticmethod
    def _key(first: bool) -> str:
        return f"pass word of {'first' if first else 'second'}"
