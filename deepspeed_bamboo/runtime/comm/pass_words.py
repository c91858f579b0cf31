"""What the two sides of a channel send first, so that each knows that the other is a worker of the same job.

Gloo doesn't check who connects. So each side has a number used once, which it sends through a store that only workers
of the job can read. The first thing on the connection is an HMAC over both numbers with the job secret.
"""

from __future__ import annotations

import hashlib
import hmac
import os

from deepspeed_bamboo.trust.handshake import StrangerError

PASS_WORD_BYTES = 32
NONCE_BYTES = 32


class PassWords:
    """Of one side of a pair, for one connection."""

    def __init__(self, *, secret: str, first: bool) -> None:
        self._secret, self._first = secret, first
        self.nonce = os.urandom(NONCE_BYTES)
        """This side's number, for the other side."""
        self._theirs: bytes | None = None

    def hear(self, nonce: bytes) -> None:
        """The other side's number."""
        self._theirs = nonce

    def own(self) -> bytes:
        """What this side has to say. Raises StrangerError before the other side's number is known."""
        return self._word(first=self._first)

    def check(self, heard: bytes, *, peer: str) -> None:
        """Raises StrangerError unless ``heard`` is what the other side has to say."""
        if not hmac.compare_digest(heard, self._word(first=not self._first)):
            raise StrangerError(f"whoever answers in the place of worker {peer} does not know the job's secret")

    def _word(self, *, first: bool) -> bytes:
        if self._theirs is None:
            raise StrangerError("the other side has put no number into the store of the two")
        nonces = (self.nonce, self._theirs) if self._first else (self._theirs, self.nonce)
        text = b"bamboo channel" + (b"1" if first else b"2") + b"".join(nonces)
        return hmac.new(self._secret.encode(), text, hashlib.sha256).digest()
