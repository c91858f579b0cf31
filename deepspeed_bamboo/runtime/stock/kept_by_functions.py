"""What functions given to ``initialize`` keep of the optimizers and schedulers that they make stays the script's first.

Such a function is called again for each further stage, shadow and rebuilt stage. A script whose function also puts
what it makes into a global variable, an attribute or a dictionary uses that as the one it trains with. So it keeps
what the first call made, which stands for the stage that acts (``held_objects.py``).
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from deepspeed_bamboo.runtime.stock.held_values import global_names, is_of_a_library

_Change = tuple[Callable[[Any], None], Any]


@contextmanager
def kept_from_before(*functions: Any) -> Iterator[None]:
    """Calls of ``functions`` inside the block leave the script's references to optimizers and schedulers as they are.

    Those are looked for in closures, in the global variables that a function names, and in the attributes and keys of
    objects, modules and dictionaries there. What is no function is left alone.
    """
    holders = [holder for function in functions for holder in _holders(function)]
    before = [dict(holder) for holder in holders]
    cells = [cell for function in functions for cell in _cells(function)]
    contents = [_content(cell) for cell in cells]
    try:
        yield
    finally:
        for holder, values in zip(holders, before, strict=True):
            changed = {name: its for name, its in values.items() if _replaced(its, holder.get(name, its))}
            holder.update(changed)
        for cell, content in zip(cells, contents, strict=True):
            if _replaced(content, _content(cell)):
                cell.cell_contents = content


def _replaced(before: Any, now: Any) -> bool:
    return before is not now and _is_made(before) and _is_made(now)


def _is_made(value: Any) -> bool:
    return not isinstance(value, type) and hasattr(value, "state_dict") and hasattr(value, "step")


def _holders(function: Any) -> Iterator[dict[str, Any]]:
    """Dictionaries in which ``function`` may put what it makes."""
    if isinstance(function, functools.partial):
        yield from _holders(function.func)
        for argument in (*function.args, *function.keywords.values()):
            yield from _inside(argument)
    elif isinstance(function, types.MethodType):
        yield from _inside(function.__self__)
        yield from _holders(function.__func__)
    elif isinstance(function, types.FunctionType):
        names = function.__globals__
        if is_of_a_library(function.__module__):
            return
        yield names
        yield vars(function)
        kept = [names[name] for name in global_names(function.__code__) if name in names]
        for value in (*kept, *map(_content, _cells(function)), *(function.__defaults__ or ())):
            yield from _inside(value)
    elif callable(function):
        yield from _inside(function)


def _inside(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
    elif isinstance(value, types.ModuleType):
        if not is_of_a_library(value.__name__):
            yield vars(value)
    elif not is_of_a_library(type(value).__module__) and isinstance(getattr(value, "__dict__", None), dict):
        yield vars(value)


def _cells(function: Any) -> tuple[types.CellType, ...]:
    if isinstance(function, functools.partial):
        return _cells(function.func)
    return getattr(getattr(function, "__func__", function), "__closure__", None) or ()


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None
