"""Kinds of objects that scripts keep values in, besides plain containers and objects of their own classes.

Subclasses of dict, list and set (configurations with attributes, mostly), namespaces, members of enumerations, exact
numbers, buffers. ``held_values.py`` reads them, ``held_fitting.py`` makes them.
"""

from __future__ import annotations

import array
import enum
import functools
import sys
import sysconfig
import types
from collections import OrderedDict, defaultdict
from decimal import Decimal
from fractions import Fraction
from typing import Any

NUMBERS = {"Fraction": Fraction, "Decimal": Decimal}
ITSELF = ["plain", "itself"]
"""The attributes of a dictionary whose keys they are (``self.__dict__ = self``)."""
_NEW = (object.__new__, types.SimpleNamespace.__new__)
_BASES = (dict, list, set)


def is_made_plainly(kind: type) -> bool:
    """Whether an object of ``kind``, which has attributes, is made empty by ``__new__`` and is what they are."""
    return getattr(kind, "__new__", None) in _NEW and _has_attributes(kind) and not _has_finalizer(kind)


def has_attributes_only(kind: type) -> bool:
    """Whether all that an object of ``kind`` holds are its attributes, however it is made."""
    plain_layout = not issubclass(kind, (*_BASES, tuple, frozenset, str, bytes, int, float, complex, BaseException))
    return plain_layout and _has_attributes(kind)


def base_of(kind: type) -> type | None:
    """Of a class made from dict, list or set which one that is, where it keeps nothing but items and attributes."""
    if issubclass(kind, (OrderedDict, defaultdict)) or not _has_attributes(kind) or _has_finalizer(kind):
        return None
    return next((base for base in _BASES if issubclass(kind, base) and kind.__new__ is base.__new__), None)


def read_whole(value: Any) -> list[Any] | None:
    """The form of a value that holds no others, for :func:`made`; None for another kind."""
    kind = type(value)
    if kind in (Fraction, Decimal):
        return ["number", kind.__name__, str(value)]
    if kind is bytearray:
        return ["buffer", "", bytes(value)]
    if kind is array.array:
        return ["buffer", value.typecode, value.tobytes()]
    return None


def read_member(value: enum.Enum) -> list[Any] | None:
    """The class is the reader's; here the name of a member of an enumeration, or the number of a combined flag."""
    if type(value).__members__.get(str(value.name)) is value:
        return ["plain", value.name]
    return ["plain", value.value] if isinstance(value, enum.Flag) and type(value.value) is int else None


def member(kind: Any, key: Any) -> Any:
    """The inverse. Raises LookupError where ``kind`` has none."""
    if not isinstance(kind, type) or not issubclass(kind, enum.Enum):
        raise LookupError(f"enumeration {kind}")
    try:
        return kind[key] if isinstance(key, str) else kind(key)
    except ValueError as error:
        raise LookupError(str(error)) from error


def buffer(existing: Any, typecode: str, content: bytes) -> Any:
    """A buffer with ``content``: ``existing`` where that is one of this kind."""
    new: Any = array.array(typecode, content) if typecode else bytearray(content)
    if type(existing) is not type(new) or getattr(existing, "typecode", "") != typecode:
        return new
    existing[:] = new
    return existing


def _has_attributes(kind: type) -> bool:
    slots = any(vars(base).get("__slots__") for base in kind.__mro__[:-1])
    return getattr(kind, "__dictoffset__", 0) != 0 and not slots


def _has_finalizer(kind: type) -> bool:
    return any("__del__" in vars(base) for base in kind.__mro__[:-1])


def is_the_scripts(kind: type) -> bool:
    """Whether a class is from none of the packages that are installed, nor Python's own."""
    return _is_a_scripts(str(kind.__module__))


@functools.lru_cache(maxsize=4096)
def _is_a_scripts(module: str) -> bool:
    source = getattr(sys.modules.get(module), "__file__", None)
    if module == "__main__":
        return True
    places = {*sysconfig.get_paths().values(), sys.prefix, sys.base_prefix}
    return source is not None and not any(str(source).startswith(place) for place in places)
