"""The members of one of torch's gloo groups prove to each other that they know the job secret.

Gloo takes the first process that connects for a member. So each member puts a number used once into the store at which
the group has met, and sends each other member, on their connection, an HMAC over both numbers.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from datetime import timedelta
from typing import Any

import torch

from deepspeed_bamboo.runtime.comm.c10d import c10d
from deepspeed_bamboo.trust.handshake import StrangerError

_TAG = 0x62616D62
_BYTES = 32
_WITHIN = timedelta(seconds=60)  # all members are there: the group has been made


class ProvingGloo:
    """Stands for torch's class ProcessGroupGloo where torch makes such groups: each is proved before its use."""

    def __init__(self, stock: Any, *, secret: str) -> None:
        self._stock, self._secret = stock, secret

    def __call__(self, store: Any, rank: int, size: int, *rest: Any, **options: Any) -> Any:
        """As the class's. Raises StrangerError when one of the members does not know the secret."""
        group = self._stock(store, rank, size, *rest, **options)
        prove_to_all(group, store, rank=rank, size=size, secret=self._secret)
        return group

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, self._stock)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stock, name)


def prove_to_all(group: Any, store: Any, *, rank: int, size: int, secret: str) -> None:
    """Collective. Raises StrangerError that names the member that is none, or says nothing for a minute."""
    own = os.urandom(_BYTES)
    store = c10d.PrefixStore("proof", store)
    store.set(str(rank), own.hex())
    others = [other for other in range(size) if other != rank]
    nonces = {other: bytes.fromhex(store.get(str(other)).decode("ascii")) for other in others}
    said = {other: _word(secret, rank, other, own, nonces[other]) for other in others}
    heard = {other: torch.zeros(_BYTES, dtype=torch.uint8) for other in others}
    try:
        sending = [group.send([_tensor(word)], other, _TAG) for other, word in said.items()]
        receiving = {other: group.recv([tensor], other, _TAG) for other, tensor in heard.items()}
    except RuntimeError as error:
        raise _stranger("others", error) from error
    for other, work in receiving.items():
        try:
            work.wait(_WITHIN)
        except RuntimeError as error:
            raise _stranger(str(other), error) from error
        if not hmac.compare_digest(heard[other].numpy().tobytes(), _word(secret, other, rank, nonces[other], own)):
            raise _stranger(str(other), None)
    for work in sending:
        work.wait(_WITHIN)


def _stranger(rank: str, error: Exception | None) -> StrangerError:
    why = "does not know the job's secret" if error is None else f"does not prove that it is one of the job's ({error})"
    return StrangerError(
        f"while torch's process group was made: whoever answers in the place of rank {rank} {why}. Nothing has been "
        "sent to it. Start the command again; docs/security.md says who can do this"
    )


def _tensor(word: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(word), dtype=torch.uint8)


def _word(secret: str, sender: int, receiver: int, its: bytes, others: bytes) -> bytes:
    """What ``sender`` says to ``receiver``."""
    return hmac.new(
        secret.encode(), f"bamboo group {sender} {receiver} ".encode() + its + others, hashlib.sha256
    ).digest()
