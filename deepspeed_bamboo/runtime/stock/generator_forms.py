"""Generators of numpy and Python as plain data: of which class they are, and where in their sequence.

The state is JSON in bytes: a bit generator of numpy counts in numbers that no message has a form for.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

import numpy as np

_NAMES = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")
BITS: Mapping[str, type] = {name: getattr(np.random, name) for name in _NAMES if hasattr(np.random, name)}
"""What a ``numpy.random.Generator`` draws from; several may share one."""
PLAIN: Mapping[str, type] = {"Random": random.Random, "RandomState": np.random.RandomState}
"""Generators that are their state."""
KINDS = (random.Random, np.random.RandomState, np.random.Generator, np.random.BitGenerator)
"""These, and classes made of them."""


def state_bytes(value: Any) -> bytes:
    """Of a generator of one of :data:`PLAIN` or :data:`BITS`; equal where the next numbers are."""
    if type(value) is random.Random:
        return _to_bytes(value.getstate())
    return _to_bytes(value.get_state(legacy=False) if isinstance(value, np.random.RandomState) else value.state)


def family_bytes(bits: Any) -> bytes:
    """Where a bit generator comes from, by which ``spawn`` makes others of it; nothing where it can't be told."""
    known = getattr(bits, "seed_seq", None)
    if type(known) is not np.random.SeedSequence:
        return b""
    return _to_bytes([known.entropy, list(known.spawn_key), known.pool_size, known.n_children_spawned])


def new_bits(name: str, family: bytes) -> Any:
    """A bit generator. Raises LookupError where this numpy has none of that name."""
    if name not in BITS:
        raise LookupError(f"no numpy.random.{name} is known here")
    if not family:
        return BITS[name](0)
    entropy, key, size, spawned = _from_bytes(family)
    return BITS[name](np.random.SeedSequence(entropy, spawn_key=key, pool_size=size, n_children_spawned=spawned))


def new_plain(name: str, state: bytes) -> Any:
    """A generator of :data:`PLAIN` that can take ``state``."""
    if name != "RandomState":
        return PLAIN[name]()
    return np.random.RandomState(new_bits(_from_bytes(state)["bit_generator"], b""))


def set_state(value: Any, state: bytes) -> None:
    """Bring a generator to where ``state`` is from."""
    its = _from_bytes(state)
    if type(value) is random.Random:
        value.setstate((its[0], tuple(its[1]), its[2]))
    elif isinstance(value, np.random.RandomState):
        value.set_state(its)
    else:
        value.state = its


def takes(value: Any, state: bytes) -> bool:
    """Whether ``value``, of the same class, can be brought to ``state``."""
    if type(value) is not np.random.RandomState:
        return True
    return bool(value.get_state(legacy=False)["bit_generator"] == _from_bytes(state)["bit_generator"])


def _to_bytes(value: Any) -> bytes:
    return json.dumps(value, default=_as_plain).encode()


def _as_plain(value: Any) -> Any:
    return {"array": [value.dtype.str, value.tolist()]} if isinstance(value, np.ndarray) else value.item()


def _from_bytes(data: bytes) -> Any:
    return json.loads(data, object_hook=_with_array)


def _with_array(value: dict[str, Any]) -> Any:
    return np.array(value["array"][1], dtype=value["array"][0]) if value.keys() == {"array"} else value
