"""How gradients are clipped, where a script sets ``engine.optimizer.clip_grad`` by hand (fp16, bf16, ZeRO)."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import Any

from deepspeed_bamboo.core.grid import Coordinate
from deepspeed_bamboo.runtime.stock.replica import StageReplica


class ClippingByHand:
    """Carries what a script writes there, for one of its stages, to every stage that its worker owns.

    As with parameter groups (:mod:`script_writes`): a stage taken over continues with its former owner's value, and
    with what the script of its new worker has written since the last step.
    """

    def __init__(self) -> None:
        # By source and target, both by id: the source's value that the target has followed.
        self._followed: dict[tuple[int, int], Any] = {}
        self._used: dict[int, Any] = {}

    def follow(self, sources: Sequence[Any], owners: Sequence[StageReplica]) -> None:
        """Before a step. ``sources``: DeepSpeed's wrappers of optimizers that the script may write to."""
        for source in sources:
            now = clipping_of(source)
            for owner in owners:
                target = owner.attributes["optimizer"]
                key = id(source), id(target)
                if target is not source and self._followed.get(key, now) != now and clipping_of(target) is not None:
                    target.clip_grad = now
                self._followed[key] = now
            self._used[id(source)] = now

    def stepped(
        self, sources: Sequence[Any], replicas: Iterable[StageReplica], *, shadows: Container[Coordinate]
    ) -> None:
        """After a step: its shadows have followed what counted in it."""
        followed: dict[tuple[int, int], Any] = {}
        for source in sources:
            now = clipping_of(source)
            for replica in replicas:
                key = id(source), id(replica.attributes["optimizer"])
                is_shadow = replica.coordinate in shadows
                followed[key] = self._used.get(id(source), now) if is_shadow else self._followed.get(key, now)
        self._followed = followed


def clipping_of(optimizer: Any) -> Any:
    """The largest norm of gradients that ``optimizer`` lets pass; None for one that does not clip by itself."""
    return getattr(optimizer, "clip_grad", None)
