"""The header of a message on a channel: what it is, plain data, and the form of the tensors that follow it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from deepspeed_bamboo.errors import MessageError
from deepspeed_bamboo.runtime.comm.encoding import DTYPES, decode, encode

Description = Sequence[tuple[torch.dtype, tuple[int, ...]]]
"""Type and shape of every tensor."""

HEADER_LIMIT_BYTES = 2**31
_MOST_DIMENSIONS = 64
_PLACES = {dtype: place for place, dtype in enumerate(DTYPES)}


@dataclass(frozen=True)
class Header:
    """``on_lane``: the tensors come over a lane for device tensors, and not behind the header."""

    key: str
    data: Any
    description: Description
    on_lane: bool

    def to_bytes(self) -> bytes:
        """Raises UnsendableError for data, or a type of tensor, that can't be sent."""
        forms = [[_PLACES.get(dtype, dtype), *shape] for dtype, shape in self.description]
        return encode([self.key, self.data, forms, self.on_lane])

    @classmethod
    def from_bytes(cls, content: bytes, *, payload_bytes: int) -> Header:
        """Inverse of :meth:`to_bytes`; so many bytes of tensors follow. Raises MessageError for anything else."""
        value = decode(content)
        if not isinstance(value, list) or len(value) != 4:
            raise MessageError("a message whose header is no list of four")
        key, data, forms, on_lane = value
        if type(key) is not str or type(on_lane) is not bool or type(forms) is not list:
            raise MessageError("a message whose header has no key, no forms of tensors, or no mark of its lane")
        description = [_form(form) for form in forms]
        expected = 0 if on_lane else sum(math.prod(shape) * dtype.itemsize for dtype, shape in description)
        if expected != payload_bytes:
            raise MessageError(f"message {key!r:.80} announces {payload_bytes} bytes for tensors of {expected} bytes")
        return cls(key, data, description, on_lane)


def _form(form: Any) -> tuple[torch.dtype, tuple[int, ...]]:
    if type(form) is not list or not 1 <= len(form) <= 1 + _MOST_DIMENSIONS or any(type(n) is not int for n in form):
        raise MessageError(f"a message with a tensor of the form {form!r:.80}")
    place, *shape = form
    if not 0 <= place < len(DTYPES) or any(not 0 <= extent < 2**63 for extent in shape):
        raise MessageError(f"a message with a tensor of type {place} and shape {shape!r:.80}")
    return DTYPES[place], tuple(shape)
