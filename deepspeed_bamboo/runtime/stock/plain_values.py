"""Numbers and words that layers have as attributes: a temperature that the script anneals, a count of forwards.

Cheap enough to look at in every step. A shadow needs them as its owner has them when a step begins: then it computes
what the owner computes, also where a forward moves them. So those that have ever changed go to shadows with the
gradients of each step; what the script changes between two steps is found before the next one (``owner_changes.py``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from deepspeed.pipe import PipelineModule

from deepspeed_bamboo.runtime.stock.description import is_foreign, is_torchs
from deepspeed_bamboo.runtime.stock.root_values import own_of_root
from deepspeed_bamboo.runtime.stock.script_hooks import LOSS, is_of_stage

PlainValues = dict[str, dict[str, Any]]
"""By the path of a module (``loss_fn`` for a loss that is none) its values by name."""

PLAIN = frozenset({bool, int, float, str})
"""The classes of what is followed here; all else is in ``held_attributes.py``."""


class MovingValues:
    """Of one stage: which of its values have ever changed."""

    def __init__(self) -> None:
        self._known: PlainValues | None = None
        self._moving: dict[str, set[str]] = {}
        self._looks = 0

    def look(self, module: torch.nn.Module) -> PlainValues:
        """What has changed since the last look; nothing in the first one."""
        self._looks += 1
        now = plain_values(module, foreign_too=True)
        before, self._known = self._known, now
        changed = {} if before is None or before == now else changes(before, now)
        for path, values in changed.items():
            self._moving.setdefault(path, set()).update(values)
        return changed

    def include(self, values: PlainValues) -> None:
        """These move at the owner, so they will here, when this replica is an owner."""
        self._looks += 2
        for path, its in values.items():
            self._moving.setdefault(path, set()).update(its)

    def at_risk(self, module: torch.nn.Module) -> PlainValues:
        """What has ever changed; all, as long as nobody has looked twice."""
        return self.values(module) if self._looks > 1 else plain_values(module)

    def all_values(self, module: torch.nn.Module) -> PlainValues:
        """What goes with a stage's state."""
        found = plain_values(module)
        for path, values in self.values(module).items():
            found.setdefault(path, {}).update(values)
        return found

    def values(self, module: torch.nn.Module) -> PlainValues:
        """Of all that has ever changed, what it is now."""
        if not self._moving:
            return {}
        now = plain_values(module, foreign_too=True)
        kept = {
            path: {n: v for n, v in now.get(path, {}).items() if n in names} for path, names in self._moving.items()
        }
        return {path: values for path, values in kept.items() if values}


def plain_values(module: torch.nn.Module, *, foreign_too: bool = False) -> PlainValues:
    """Those of all layers of a stage, and of its loss function.

    ``foreign_too``: also those that may be others on another machine by their name (``self.rank``). What forwards move
    is none of those, whatever it is called.
    """
    found = {}
    for path, holder in _holders(module):
        if not path and not foreign_too:
            continue  # what a subclass notes of itself may be another one on each worker, until it moves
        has = holder.__dict__.items() if path else own_of_root(holder)
        # Classes first: of the twenty attributes of a module few are plain.
        plain = {n: v for n, v in has if v.__class__ in PLAIN}
        values = {n: v for n, v in plain.items() if not (is_foreign(n) and (not foreign_too or is_torchs(n)))}
        if values:
            found[path] = values
    return found


def accept_plain_values(module: torch.nn.Module, values: PlainValues) -> None:
    """Set ``values`` in another replica of the stage, in which no forward may have made them yet.

    What the PipelineModule itself has not is left out, and so is what a layer's class sets by a rule of its own.
    """
    if not values:
        return
    for path, holder in _holders(module):
        for name, value in values.get(path, {}).items():
            if name in holder.__dict__ or (path and not hasattr(getattr(type(holder), name, None), "__set__")):
                holder.__dict__[name] = value


def plain_of_the_script(holder: Any) -> dict[str, Any]:
    """Those of an optimizer or scheduler of the script's, which its ``state_dict`` may leave out; {} for others."""
    if holder is None or type(holder).__module__.startswith(("torch.", "deepspeed.")):
        return {}
    return {name: value for name, value in vars(holder).items() if value.__class__ in PLAIN}


def accept_plain_of_the_script(holder: Any, values: dict[str, Any]) -> None:
    """Inverse of :func:`plain_of_the_script`."""
    for name, value in values.items():
        if holder is not None and name in vars(holder):
            vars(holder)[name] = value


def changes(before: PlainValues, now: PlainValues) -> PlainValues:
    """Of ``now`` what was there before with another value."""
    found = {}
    for path, values in now.items():
        known = before.get(path, {})
        changed = {} if known == values else {n: v for n, v in values.items() if n in known and known[n] != v}
        if changed:
            found[path] = changed
    return found


def _holders(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    if isinstance(module, PipelineModule):
        yield "", module
    for path, part in module.named_modules():
        if is_of_stage(module, path):
            yield path, part
    loss = getattr(module, LOSS, None)
    if not is_of_stage(module, LOSS):
        return
    if not isinstance(loss, torch.nn.Module) and hasattr(loss, "__dict__") and not hasattr(loss, "__get__"):
        yield LOSS, loss
