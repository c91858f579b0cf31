"""How gradients are clipped, where a script sets ``engine.optimizer.clip_grad`` by hand (fp16, bf16, ZeRO)."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import Any

from deepspeed_bamboo.core.grid import Coordinate
from deepspeed_bamboo.runtime.stock.replica import StageReplica


class ClippingByHand:
    """Carries what a script writes there, for one of its stages, to every stage that its worker owns.

    As with parameter groups (:mod:`script_writes`): a stage taken over continues with its former owner's value, and
    with what the script of its new worker has written since the last step. A shadow gets its owner's value with the
    mirrored gradients of each step.
    """

    def __init__(self) -> None:
        # By source and target, both by id: the source's value that the target has followed.
        self._followed: dict[tuple[int, int], Any] = {}
        self._used: dict[int, Any] = {}
        self._left: dict[int, Any] = {}  # by source, by id: what it was when nobody but the script could change it

    def follow(self, sources: Sequence[Any], owners: Sequence[StageReplica]) -> tuple[Any, ...]:
        """Before a step. ``sources``: DeepSpeed's wrappers of optimizers that the script may write to.

        Returns what the script has written there since the last call.
        """
        values = [(self._left.get(id(source), clipping_of(source)), clipping_of(source)) for source in sources]
        for source, (left, _) in zip(sources, values, strict=True):
            now = clipping_of(source)
            for owner in owners:
                target = owner.attributes["optimizer"]
                key = id(source), id(target)
                if target is not source and self._followed.get(key, left) != now and clipping_of(target) is not None:
                    target.clip_grad = now
                self._followed[key] = now
            self._used[id(source)] = now
        self.leave(sources)
        return tuple(dict.fromkeys(now for left, now in values if left != now))

    def leave(self, sources: Sequence[Any]) -> None:
        """From now on only the script changes it."""
        self._left = {id(source): clipping_of(source) for source in sources}

    def note(self, optimizer: Any) -> None:
        """It has got its owner's values just now."""
        if id(optimizer) in self._left:
            self._left[id(optimizer)] = clipping_of(optimizer)

    def write_again(self, sources: Sequence[Any], values: Iterable[Any]) -> None:
        """What :meth:`follow` has returned, before a step that is done again."""
        for value in values:
            for source in sources:
                if clipping_of(source) is not None:
                    source.clip_grad = value
        self.leave(sources)

    def restored(self, sources: Sequence[Any], replicas: Iterable[StageReplica]) -> None:
        """All have a state of before."""
        targets = [id(replica.attributes["optimizer"]) for replica in replicas]
        self._followed = {(id(source), target): clipping_of(source) for source in sources for target in targets}
        self.leave(sources)

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
