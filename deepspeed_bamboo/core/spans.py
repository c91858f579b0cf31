"""How long the passes of whole iterations took, and whether a slow worker shows in that.

Pure. On a GPU a pass takes longer where the host launches it late, and the same pass of the same worker takes a
fraction of that where the launches are ahead of the device. So longer passes alone don't make a worker slow: the
iteration has to take longer, too, about as much as it would with such a worker.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from statistics import median

_KEPT = 48  # iterations of a spread that say how it used to be
_ENOUGH = 5  # iterations of a past that counts
_SPREADS = 16  # of which something is kept
_SHOWN = 0.5  # of the predicted seconds, for a slow worker to be believed


@dataclass(frozen=True)
class Spans:
    """``kept``: by how the work was spread the seconds from the first pass of an iteration to the last, newest last."""

    kept: Mapping[Hashable, tuple[float, ...]] = field(default_factory=dict)

    def after(self, spread: Hashable, *, seconds: float) -> Spans:
        """With one more iteration, whose work was spread like ``spread``: any value that compares equal then."""
        others = [(key, its) for key, its in self.kept.items() if key != spread][1 - _SPREADS :]
        return Spans({**dict(others), spread: (*self.kept.get(spread, ()), seconds)[-_KEPT:]})

    def show(self, spread: Hashable, *, newest: int, predicted: Callable[[], float]) -> bool:
        """Whether the ``newest`` iterations took enough longer than those before, of ``spread``.

        ``predicted`` returns how many seconds an iteration takes longer with the slow worker; it is called only where
        that decides. True where the past is too short.
        """
        its = self.kept.get(spread, ())
        past = its[:-newest]
        if len(past) < _ENOUGH:
            return True
        grown = median(its[-newest:]) - median(past)
        return grown >= 0.0 and grown >= _SHOWN * predicted()
