"""The scale of the loss (fp16), where a script sets ``engine.optimizer.cur_scale`` by hand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from deepspeed_bamboo.runtime.stock.gradients import accept_scale_state, scale_state


class ScaleByHand:
    """Carries what the script writes there to all stages of its worker, shadows too.

    The last stage multiplies by the scale, and each stage divides by its own: so a script sets the same one everywhere.
    """

    def __init__(self) -> None:
        self._left: dict[int, dict[str, Any]] = {}  # by source, by id

    def follow(self, sources: Sequence[Any], targets: Iterable[Any]) -> None:
        """Before a step. ``sources``: DeepSpeed's wrappers of optimizers that the script may write to."""
        written: dict[str, Any] = {}
        for source in sources:
            left = self._left.get(id(source))
            now = scale_state(source)
            written.update({name: value for name, value in now.items() if left is not None and left[name] != value})
        if written:
            for target in targets:
                accept_scale_state(target, written)

    def leave(self, sources: Sequence[Any]) -> None:
        """After a step: from now on only the script changes it."""
        self._left = {id(source): scale_state(source) for source in sources}
