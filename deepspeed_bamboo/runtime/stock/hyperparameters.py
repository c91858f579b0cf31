"""What parameter groups hold besides parameters: learning rate, weight decay, betas and whatever else there is."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

Values = tuple[dict[str, Any], ...]
"""One dictionary for each parameter group, without its parameters."""

_PARAMETERS = "params"
# What tells nothing about which group of another stage a group corresponds to.
_NO_SIGN = frozenset({"step", "name", "initial_lr"})


def values_of(optimizer: Any) -> Values:
    """A copy of all that ``optimizer.param_groups`` hold besides parameters. Tensors are copied to the host."""
    return tuple(
        {key: _copied(value) for key, value in group.items() if key != _PARAMETERS} for group in optimizer.param_groups
    )


def accept_values(optimizer: Any, values: Values) -> None:
    """Write what :func:`values_of` returned for an optimizer with the same groups."""
    for group, new in zip(optimizer.param_groups, values, strict=True):
        for key, value in new.items():
            _write(group, key, value)


def carry(before: Values, now: Values, target: Any, pairs: Sequence[int | None], tell: Callable[[str], None]) -> None:
    """Do to the groups of ``target`` what was done to those of another stage, which had ``before`` and have ``now``.

    ``pairs`` says for each group of ``target`` which of the other's it follows, or None. A value that was equal in
    both becomes what it is ``now``. A number that was another one changes in proportion, and ``tell`` is called with a
    sentence about that; anything else that was different stays, and is reported as well.
    """
    for group, source in zip(target.param_groups, pairs, strict=True):
        if source is None or source >= len(before) or source >= len(now):
            continue
        for key, value in now[source].items():
            was = before[source].get(key)
            if (key in before[source] and same(was, value)) or same(group.get(key), value):
                continue
            if key not in group or same(group[key], was):
                _write(group, key, value)
            elif _is_number(was) and _is_number(value) and _is_number(group[key]) and was:
                group[key] = type(value)(group[key] * (value / was))
                tell(
                    f"the script changed {key} from {was} to {value} for one stage of this worker; another one had a "
                    f"value of its own, which changes in proportion, to {group[key]}"
                )
            else:
                tell(f"the script changed {key} to {value}; another stage of this worker keeps its own: {group[key]}")


def corresponding(own: Values, other: Values) -> tuple[int | None, ...]:
    """For each group of ``own`` the group of another stage's optimizer that it follows; both as they were made.

    That is the one of the same name; else the one made with the same values (of several, the one at the same place
    among them); else the one at the same position, or the last.
    """
    if not other:
        return tuple(None for _ in own)
    names = [group.get("name") for group in other]
    found: list[int | None] = []
    for position, group in enumerate(own):
        name = group.get("name")
        alike = [index for index, candidate in enumerate(other) if _alike(group, candidate)]
        if name is not None and names.count(name) == 1:
            found.append(names.index(name))
        elif alike:
            rank = sum(_alike(group, earlier) for earlier in own[:position])
            found.append(alike[min(rank, len(alike) - 1)])
        else:
            found.append(min(position, len(other) - 1))
    return tuple(found)


def same(one: Any, other: Any) -> bool:
    """Equal, tensors to the last bit."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        both = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
        return both and one.dtype == other.dtype and torch.equal(one.cpu(), other.cpu())
    return bool(one == other)


def same_values(one: Values, other: Values) -> bool:
    """Whether all groups hold the same."""
    return len(one) == len(other) and all(
        a.keys() == b.keys() and all(same(a[key], b[key]) for key in a) for a, b in zip(one, other, strict=True)
    )


def _alike(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    keys = (one.keys() | other.keys()) - _NO_SIGN
    return all(key in one and key in other and same(one[key], other[key]) for key in keys)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _copied(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else copy.copy(value)


def _write(group: dict[str, Any], key: str, value: Any) -> None:
    held = group.get(key)
    if isinstance(held, torch.Tensor) and isinstance(value, torch.Tensor) and held.shape == value.shape:
        held.copy_(value)  # whoever holds the tensor, a captured graph for example, keeps using it
    else:
        group[key] = _copied(value)
