"""The scale of the loss (fp16), where a script sets ``engine.optimizer.cur_scale`` by hand."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from deepspeed_bamboo.runtime.stock.gradients import accept_scale_state, scale_state


class ScaleByHand:
    """Carries what the script writes there to all stages of its worker, shadows too.

    The last stage multiplies by the scale, and each stage divides by its own: so a script sets the same one everywhere.
    """

    def __init__(self) -> None:
        self._left: dict[int, dict[str, Any]] = {}  # by source, by id
        self._told: dict[str, Any] = {}  # what was written since, as far as it is known elsewhere

    def follow(self, sources: Sequence[Any], targets: Iterable[Any]) -> tuple[Mapping[str, Any], ...]:
        """Before a step. ``sources``: DeepSpeed's wrappers of optimizers that the script may write to.

        Returns what the script has written there since the last call.
        """
        written: dict[str, Any] = {}
        for source in sources:
            left = self._left.get(id(source))
            now = scale_state(source)
            written.update({name: value for name, value in now.items() if left is not None and left[name] != value})
        if written:
            for target in targets:
                accept_scale_state(target, written)
        new = {name: value for name, value in written.items() if name not in self._told or self._told[name] != value}
        self._told.update(new)
        return (new,) if new else ()

    def write_again(self, sources: Sequence[Any], values: Iterable[Mapping[str, Any]]) -> None:
        """What :meth:`follow` has returned, before a step that is done again."""
        for written in values:
            for source in sources:
                if scale_state(source):
                    accept_scale_state(source, dict(written))
            self._told.update(written)

    def note(self, optimizer: Any) -> None:
        """It has got its owner's values just now."""
        if id(optimizer) in self._left:
            self._left[id(optimizer)] = scale_state(optimizer)

    def leave(self, sources: Sequence[Any]) -> None:
        """After a step: from now on only the script changes it."""
        self._told = {}
        self._left = {id(source): scale_state(source) for source in sources}
