"""What workers tell each other as bytes: plain data, tensors and a few of this package's own values; no code.

The form is msgpack. Values that msgpack has no form for are of the kinds below, each with its own checks. A receiver
makes nothing else, whatever bytes it gets.
"""

from __future__ import annotations

import math
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np
import torch

from deepspeed_bamboo.core.grid import Coordinate
from deepspeed_bamboo.errors import MessageError, UnsendableError
from deepspeed_bamboo.runtime.comm.layout import is_layout, layout_of
from deepspeed_bamboo.runtime.comm.own_values import OWN_VALUES

_TUPLE, _TENSOR, _COORDINATE, _DTYPE, _LARGE_INT, _SET, _ORDERED, _COUNTER, _SLOT, _NUMBER, _DEVICE, _OWN = range(1, 13)

_MOST_LEVELS = 64
"""How deep tuples and other kinds may lie inside each other."""

DTYPES: tuple[torch.dtype, ...] = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.int16, torch.int32,
    torch.int64, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.uint16, torch.uint32, torch.uint64,
)  # fmt: skip
"""What a message may have tensors of; in bytes a type is its place here."""
_PLACES = {dtype: place for place, dtype in enumerate(DTYPES)}

_EXTENTS = "<{}q"
_TWO = struct.Struct("<II")
_BUFFER_BYTES = 1024  # to begin with: msgpack's own 256 KB take longer to get than most messages to pack
_WRONG = (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError, MemoryError)
_WRONG_TENSOR = (*_WRONG, RuntimeError, struct.error)


@dataclass(frozen=True)
class Slot:
    """Stands for tensor number ``index`` of those that travel beside the data."""

    index: int


def encode(value: Any) -> bytes:
    """``value`` as bytes. Its tensors must be on the host.

    Numbers, texts, bytes, None, lists, tuples, sets, dicts with such keys, tensors, and what ``own_values.py`` names.
    Raises UnsendableError that names the type of anything else.
    """
    try:
        return _pack(value)
    except UnicodeEncodeError as error:
        raise UnsendableError(f"a text with half of a character can't be sent to another worker ({error})") from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, UnsendableError):
            raise
        raise UnsendableError("a value that lies too deep, or in itself, can't be sent to another worker") from error


def decode(data: bytes) -> Any:
    """Inverse of :func:`encode`. Raises MessageError for anything that it has not made."""
    try:
        return _unpack(data, level=0)
    except MessageError:
        raise
    except _WRONG_TENSOR as error:
        raise MessageError(f"{len(data)} bytes that are no message of this job: {str(error) or type(error)}") from error


def _pack(value: Any) -> bytes:
    packed: bytes = msgpack.packb(
        value, default=_extended, strict_types=True, unicode_errors="surrogatepass", buf_size=_BUFFER_BYTES
    )
    return packed


def _unpack(data: bytes | memoryview, *, level: int) -> Any:
    if level > _MOST_LEVELS:
        raise MessageError(f"a message whose values lie more than {_MOST_LEVELS} levels deep")

    def kind(code: int, content: bytes) -> Any:
        reader = _READERS.get(code)
        if reader is None:
            raise MessageError(f"a message with a value of the unknown kind {code}")
        return reader(content, level + 1)

    return msgpack.unpackb(data, ext_hook=kind, strict_map_key=False, unicode_errors="surrogatepass")


# ---- sending -----------------------------------------------------------------------------------------


def _extended(value: Any) -> msgpack.ExtType:
    """The form of a value that msgpack has none for."""
    kind = type(value)
    if kind is tuple or kind is torch.Size:
        return msgpack.ExtType(_TUPLE, _pack(list(value)))
    if kind is Coordinate:
        return msgpack.ExtType(_COORDINATE, _TWO.pack(value.pipeline, value.stage))
    if isinstance(value, torch.Tensor):
        return msgpack.ExtType(_TENSOR, _tensor_bytes(value))
    writer = _WRITERS.get(kind)
    if writer is not None:
        code, plain = writer(value)
        return msgpack.ExtType(code, _pack(plain))
    for name, own in OWN_VALUES.items():
        if kind is own.kind:
            return msgpack.ExtType(_OWN, _pack([name, own.to_plain(value)]))
    if isinstance(value, np.generic):
        return msgpack.ExtType(_NUMBER, _pack([value.dtype.str, value.tobytes()]))
    raise UnsendableError(
        f"a {kind.__module__}.{kind.__qualname__} can't be sent to another worker, only numbers, texts, lists, dicts "
        f"and tensors can; what has it is most likely the state of an optimizer or a scheduler: {value!r:.200}"
    )


_WRITERS: Mapping[type, Callable[[Any], tuple[int, Any]]] = {
    Slot: lambda value: (_SLOT, value.index),
    int: lambda value: (_LARGE_INT, str(value)),
    OrderedDict: lambda value: (_ORDERED, [list(pair) for pair in value.items()]),
    Counter: lambda value: (_COUNTER, [list(pair) for pair in value.items()]),
    set: lambda value: (_SET, [False, *value]),
    frozenset: lambda value: (_SET, [True, *value]),
    torch.dtype: lambda value: (_DTYPE, _PLACES[value]),
    torch.device: lambda value: (_DEVICE, str(value)),
}


def _tensor_bytes(tensor: torch.Tensor) -> bytes:
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or tensor.dtype not in _PLACES:
        raise UnsendableError(f"a tensor of {tensor.dtype} on {tensor.device} can't be sent to another worker as data")
    layout = layout_of(tensor)
    value = tensor.detach().contiguous() if layout is None else tensor.detach()
    numbers = value.as_strided((value.numel(),), (1,))
    extents = (*tensor.shape, *(layout or ()))
    head = struct.pack("<BBB", _PLACES[tensor.dtype], tensor.dim(), layout is not None)
    return head + struct.pack(_EXTENTS.format(len(extents)), *extents) + numbers.view(torch.uint8).numpy().tobytes()


# ---- receiving ---------------------------------------------------------------------------------------


def _list(content: bytes, level: int) -> list[Any]:
    value = _unpack(content, level=level)
    if not isinstance(value, list):
        raise MessageError(f"a message with a {type(value).__name__} where a list belongs")
    return value


def _of(kind: type, content: bytes, level: int) -> Any:
    value = _unpack(content, level=level)
    if type(value) is not kind:
        raise MessageError(f"a message with a {type(value).__name__} where a {kind.__name__} belongs")
    return value


def _coordinate(content: bytes, level: int) -> Coordinate:
    return Coordinate(*_TWO.unpack(content))


def _tensor(content: bytes, level: int) -> torch.Tensor:
    place, dimensions, has_layout = content[:3]
    numbers = dimensions * (2 if has_layout else 1)
    start = 3 + 8 * numbers
    extents = struct.unpack(_EXTENTS.format(numbers), content[3:start])
    shape, strides = extents[:dimensions], extents[dimensions:]
    if place >= len(DTYPES) or any(extent < 0 for extent in shape) or (has_layout and not is_layout(shape, strides)):
        raise MessageError(f"a message with a tensor of type {place} and shape {shape}")
    dtype = DTYPES[place]
    if math.prod(shape) * dtype.itemsize != len(content) - start:
        raise MessageError(f"a message with {len(content) - start} bytes for a tensor of {dtype} and shape {shape}")
    if len(content) == start:
        return torch.empty(shape, dtype=dtype)
    # Of memory of its own, which a tensor may change.
    flat = torch.frombuffer(bytearray(content[start:]), dtype=dtype)
    return flat.as_strided(shape, strides) if has_layout else flat.view(shape)


def _number(content: bytes, level: int) -> Any:
    name, data = _list(content, level)
    dtype = np.dtype(name) if isinstance(name, str) else None
    if dtype is None or dtype.kind not in "biufc" or not isinstance(data, bytes) or len(data) != dtype.itemsize:
        raise MessageError(f"a message with a number of type {name!r:.40}")
    return np.frombuffer(data, dtype=dtype)[0]


def _large_int(content: bytes, level: int) -> int:
    text = _of(str, content, level)
    if len(text) > 400:
        raise MessageError(f"a message with a number of {len(text)} digits")
    return int(text)


def _set(content: bytes, level: int) -> Any:
    frozen, *items = _list(content, level)
    return frozenset(items) if frozen else set(items)


def _own_value(content: bytes, level: int) -> Any:
    name, plain = _list(content, level)
    if name not in OWN_VALUES:
        raise MessageError(f"a message with a value of the unknown kind {name!r:.40}")
    return OWN_VALUES[name].from_plain(plain)


def _slot(content: bytes, level: int) -> Slot:
    index = _of(int, content, level)
    if index < 0:
        raise MessageError(f"a message that names tensor {index}")
    return Slot(index)


_READERS: Mapping[int, Callable[[bytes, int], Any]] = {
    _TUPLE: lambda content, level: tuple(_list(content, level)),
    _TENSOR: _tensor,
    _COORDINATE: _coordinate,
    _DTYPE: lambda content, level: DTYPES[_of(int, content, level)],
    _LARGE_INT: _large_int,
    _SET: _set,
    _ORDERED: lambda content, level: OrderedDict(_list(content, level)),
    _COUNTER: lambda content, level: Counter(dict(_list(content, level))),
    _SLOT: _slot,
    _NUMBER: _number,
    _DEVICE: lambda content, level: torch.device(_of(str, content, level)),
    _OWN: _own_value,
}
