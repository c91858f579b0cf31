"""What ``train_batch``, ``eval_batch`` and ``get_additional_losses`` have returned, for workers that come late.

Their scripts run from the top. A script may stop early, or keep its best loss, by what it was returned. A late worker's
calls for steps that the job has done return what they returned then. All workers keep it; the reporter publishes it in
pieces, since a late worker needs it before it is one of the job's.
"""

from __future__ import annotations

import base64
import math
import struct
import threading
from array import array
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

PAST = "past"
"""Under which key a checkpoint's own state has all pieces."""
CALL = "call"
"""Under which key a job's status has the number of the call of ``train_batch`` that trained its step."""
PIECE_STEPS = 128
"""Each piece is published again until it is full, so it must be small: etcd keeps what it had before for a while."""
_TAIL_PIECES = 8
_UNKNOWN_BITS = struct.pack("<Q", 0x7FF80000000BA3B0)
_UNKNOWN: float = struct.unpack("<d", _UNKNOWN_BITS)[0]
"""Not a number, with bits that no computation gives: a loss may have been nan, which a script asks for, too."""


class PublishedPieces(Protocol):
    """Where pieces are published: a job's coordinator."""

    def publish_past(self, piece: int, value: dict[str, Any]) -> None:
        """Replace a piece."""

    def past(self, piece: int) -> dict[str, Any] | None:
        """A piece, if it is published."""


class PastResults:
    """One worker's copy. Threads may use it.

    Args:
        published: the pieces that the reporter has published.
    """

    def __init__(self, published: PublishedPieces) -> None:
        self._published = published
        self._lock = threading.Lock()
        self._losses: dict[int, array[float]] = {}
        self._additional: dict[int, dict[str, array[float]]] = {}
        self._evaluations: dict[int, list[float]] = {}
        self._changed: set[int] = set()
        self._restored: set[int] = set()  # pieces of the job's runs before, which nobody may have published in this one
        self._leaves_out = False
        self.call_of: Callable[[int], int] = int

    def count_by(self, call_of: Callable[[int], int]) -> None:
        """``call_of`` says to which call of ``train_batch`` a step of now belongs. What is kept goes by calls."""
        self.call_of = call_of

    def note_loss(self, step: int, loss: float | None) -> None:
        """``step`` had this loss; None: it isn't known here."""
        call = self.call_of(step)
        with self._lock:
            self._piece(call // PIECE_STEPS)[call % PIECE_STEPS] = _UNKNOWN if loss is None else loss
            self._changed.add(call // PIECE_STEPS)

    def note_additional(self, step: int, losses: Mapping[str, float]) -> None:
        """``step`` had these additional losses. Before :meth:`note_loss`, which says that there is something new."""
        call = self.call_of(step)
        with self._lock:
            for name, loss in losses.items():
                self._piece_of(name, call // PIECE_STEPS)[call % PIECE_STEPS] = loss

    def note_evaluation(self, step: int, loss: float) -> None:
        """One more evaluation after so many steps had this loss; nan if it had none."""
        if self._leaves_out:
            return
        call = self.call_of(step)
        with self._lock:
            self._evaluations.setdefault(call, []).append(loss)
            self._piece(call // PIECE_STEPS)
            self._changed.add(call // PIECE_STEPS)

    @contextmanager
    def leaving_out(self) -> Iterator[None]:
        """Inside, evaluations are not noted: they are of no step at which the script is."""
        self._leaves_out = True
        try:
            yield
        finally:
            self._leaves_out = False

    def loss(self, call: int) -> float | None:
        """Of that call, nan where it was that; None if it isn't known. Raises CoordinatorUnavailable."""
        found = self._known_loss(call)
        if _is_unknown(found):
            self._look(call // PIECE_STEPS)
            found = self._known_loss(call)
        return None if _is_unknown(found) else found

    def additional(self, call: int) -> dict[str, float]:
        """Those of that call by name, nan where one isn't known. Raises CoordinatorUnavailable."""
        self.loss(call)
        with self._lock:
            kept = self._additional.get(call // PIECE_STEPS, {})
            return {name: losses[call % PIECE_STEPS] for name, losses in kept.items()}

    def evaluation(self, call: int, number: int) -> float | None:
        """Of evaluation ``number`` after so many calls, nan where it was that; None if it isn't known.

        Raises CoordinatorUnavailable.
        """
        if number >= len(self._evaluations.get(call, ())):
            self._look(call // PIECE_STEPS)
        known = self._evaluations.get(call, [])
        return known[number] if number < len(known) else None

    def evaluated(self, call: int) -> int:
        """How many evaluations after so many calls are known here."""
        return len(self._evaluations.get(call, ()))

    def publish(self) -> None:
        """On the reporter: what has changed since the last call. Raises CoordinatorUnavailable; call it again then.

        A reporter that came late lacks the beginning of its first piece; others have published that.
        """
        with self._lock:
            changed, self._changed = sorted(self._changed)[-_TAIL_PIECES:], set()
        done: set[int] = set()
        try:
            self._publish_restored(besides=changed)
            for piece in changed:
                if any(map(_is_unknown, self._losses[piece][:1])):
                    self._look(piece)
                self._published.publish_past(piece, self._plain(piece))
                done.add(piece)
        finally:
            with self._lock:
                self._changed |= set(changed) - done

    def to_json(self) -> dict[str, Any]:
        """The newest pieces, for a worker that joins; it reads the others where they are published."""
        return self.pieces(newest=_TAIL_PIECES)

    def pieces(self, *, newest: int | None = None) -> dict[str, Any]:
        """All that is known here, or the ``newest`` pieces."""
        kept = sorted(self._losses)[-newest if newest else None :]
        return {str(piece): self._plain(piece) for piece in kept}

    def take(self, value: Mapping[str, Any], *, published: bool = True) -> None:
        """Inverse of :meth:`pieces`. What is known here already stays. Not ``published``: they are of a run before."""
        for piece, plain in value.items():
            self._merge(int(piece), plain)
        if not published:
            self._restored.update(map(int, value))

    # -- inside ------------------------------------------------------------------------------------

    def _publish_restored(self, *, besides: Collection[int]) -> None:
        for piece in sorted(self._restored):
            if piece not in besides and self._published.past(piece) is None:
                self._published.publish_past(piece, self._plain(piece))
            self._restored.discard(piece)

    def _piece(self, piece: int) -> array[float]:
        if piece not in self._losses:
            self._losses[piece] = array("d", [_UNKNOWN] * PIECE_STEPS)
        return self._losses[piece]

    def _piece_of(self, name: str, piece: int) -> array[float]:
        return self._additional.setdefault(piece, {}).setdefault(name, array("d", [_UNKNOWN] * PIECE_STEPS))

    def _known_loss(self, call: int) -> float:
        piece = self._losses.get(call // PIECE_STEPS)
        return _UNKNOWN if piece is None else piece[call % PIECE_STEPS]

    def _look(self, piece: int) -> None:
        plain = self._published.past(piece)
        if plain is not None:
            self._merge(piece, plain)

    def _plain(self, piece: int) -> dict[str, Any]:
        with self._lock:
            losses = _text(self._piece(piece))
            additional = {name: _text(its) for name, its in self._additional.get(piece, {}).items()}
            calls = range(piece * PIECE_STEPS, (piece + 1) * PIECE_STEPS)
            evaluations = {str(call): list(self._evaluations[call]) for call in calls if call in self._evaluations}
        return {"losses": losses, "additional": additional, "evaluations": evaluations}

    def _merge(self, piece: int, plain: Mapping[str, Any]) -> None:
        with self._lock:
            _fill(self._piece(piece), plain["losses"])
            for name, text in plain.get("additional", {}).items():
                _fill(self._piece_of(name, piece), text)
            for call, its in plain["evaluations"].items():
                if len(its) > len(self._evaluations.get(int(call), ())):
                    self._evaluations[int(call)] = [float(loss) for loss in its]


def _text(losses: array[float]) -> str:
    return base64.b64encode(losses.tobytes()).decode("ascii")


def _fill(own: array[float], text: str) -> None:
    """Put what :func:`_text` has made where ``own`` knows nothing."""
    for index, loss in enumerate(array("d", base64.b64decode(text))[:PIECE_STEPS]):
        if _is_unknown(own[index]):
            own[index] = loss


def _is_unknown(loss: float) -> bool:
    return math.isnan(loss) and struct.pack("<d", loss) == _UNKNOWN_BITS
