"""The random numbers of ``training_data``, known alike to all workers.

Stock DeepSpeed has a loader on the first and one on the last rank of each pipeline. Each makes an iterator for every
pass over the data set. That draws a seed for the loader's helper processes from torch's global generator of its rank:
for the first pass in ``initialize``, for later ones when they begin. Without helpers samples draw from the rank's
generators themselves. So a :class:`Stream` is where these generators of a rank were, in ``initialize`` and when
training began. From then on loaders draw from it and no longer from the script's generators, whoever reads.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from deepspeed_bamboo.core.grid import Coordinate
from deepspeed_bamboo.core.placement import Placement, WorkerId
from deepspeed_bamboo.runtime.iteration.worker import Worker
from deepspeed_bamboo.runtime.job.news import tell_once
from deepspeed_bamboo.runtime.stock.randomness import GeneratorStates

STREAMS = "training data"
"""Under which name a checkpoint's own state has them."""

_HOST = torch.device("cpu")
DRAWS = "training data draw"
"""Under which name a worker's part in an agreement says that a sample has drawn random numbers."""

End = tuple[int, bool]
"""A pipeline, and whether it is its last stage that reads; a pipeline of one stage has only the first."""


@dataclass(frozen=True)
class Stream:
    """See the module. Both are texts of :func:`states_to_text`: in ``initialize``, and when training began."""

    first: str
    later: str

    def before_pass(self, number: int) -> GeneratorStates:
        """Where the generators are when the iterator of that pass is made, if samples don't draw from them."""
        if number == 0:
            return states_from_text(self.first)
        return self.after_pass_began(number - 1)

    def after_pass_began(self, number: int) -> GeneratorStates:
        """Where they are when the iterator of that pass is made."""
        later = states_from_text(self.later)
        generator = torch.Generator()
        generator.set_state(later.host)
        for _ in range(number):
            torch.empty((), dtype=torch.int64).random_(generator=generator)  # as a DataLoader's iterator does
        return replace(later, host=generator.get_state())


def states_now() -> GeneratorStates:
    """Of torch's (for the host), Python's and numpy's global generators."""
    return GeneratorStates.now(_HOST, known=())


def states_to_text(states: GeneratorStates) -> str:
    """``states``, of the host's global generators, as a text of some kilobytes."""
    version, words, gauss = states.python
    plain: dict[str, Any] = {"torch": states.host.numpy().tobytes().hex(), "python": [version, list(words), gauss]}
    if states.numpy is not None:
        name, keys, *rest = states.numpy
        plain["numpy"] = [name, [int(key) for key in keys], *rest]
    return base64.b64encode(zlib.compress(json.dumps(plain).encode())).decode("ascii")


def states_from_text(text: str) -> GeneratorStates:
    """Inverse of :func:`states_to_text`."""
    plain = json.loads(zlib.decompress(base64.b64decode(text)))
    version, words, gauss = plain["python"]
    numpy = plain.get("numpy")
    return GeneratorStates(
        host=torch.frombuffer(bytearray.fromhex(plain["torch"]), dtype=torch.uint8),
        cuda_device=None,
        cuda=None,
        python=(version, tuple(words), gauss),
        numpy=None if numpy is None else tuple(numpy),
        tracked=(),
    )


class DataStreams:
    """One worker's knowledge of them.

    Args:
        noticed: returns whether a sample has drawn random numbers on this worker.
    """

    def __init__(self, *, noticed: Callable[[], bool] = lambda: False) -> None:
        self.noticed = noticed
        self.draws = False  # whether samples draw, as all know it
        self.origin = 0  # no micro-batch of a pipeline has drawn before this one, or none before it was read
        self._first: str | None = None  # of this worker; None: the script gave no training_data
        self._settled = False
        self._of: dict[End, Stream] = {}
        self._from: dict[End, WorkerId] = {}

    def begin(self) -> None:
        """In ``initialize``, in front of stock's first iterator over ``training_data``."""
        self._first = states_to_text(states_now())

    def claim(self) -> list[str] | None:
        """When ``initialize`` ends: what the others have to know of this worker."""
        return None if self._first is None else [self._first, states_to_text(states_now())]

    def learn(self, claims: Mapping[WorkerId, list[str] | None], *, placement: Placement) -> None:
        """The job begins with the owners of ``placement``, of which each claims this."""
        grid = placement.grid
        for pipeline in range(grid.pipelines):
            for last in (False, True) if grid.stages > 1 else (False,):
                owner = placement.owner(Coordinate(pipeline, grid.stages - 1 if last else 0))
                claim = claims.get(owner)
                if claim is not None:
                    self._of[pipeline, last], self._from[pipeline, last] = Stream(*claim), owner

    def settle(self, worker: Worker, *, position: int) -> None:
        """Before an iteration, which begins at micro-batch ``position``, on all workers.

        Before the job's first one, collective: where generators are now. A script may resume at a later step, and load
        an earlier one at any time.
        """
        self.origin = min(position, self.origin) if self.draws else position
        if self._settled or not self._of:
            return
        owners = set(self._from.values())
        told = worker.agree_on("training data", lambda: states_to_text(states_now()) if worker.me in owners else None)
        for end, owner in self._from.items():
            later = told.get(owner)  # None: lost since; what it said in initialize counts
            if later is not None:
                self._of[end] = replace(self._of[end], later=later)
        self._settled = True

    def stream(self, pipeline: int, *, last: bool) -> Stream | None:
        """That of an end of ``pipeline``."""
        return self._of.get((pipeline, last)) or self._of.get((pipeline, False))

    def parted(self, pipeline: int) -> bool:
        """Whether the pipeline's last stage reads other random numbers than its first."""
        return self.stream(pipeline, last=True) != self.stream(pipeline, last=False)

    # -- whether samples draw at all ---------------------------------------------------------------

    def contribution(self) -> dict[str, Any]:
        """What this worker contributes to the agreement of an iteration."""
        return {DRAWS: True} if self.noticed() and not self.draws else {}

    def take_in(self, contributions: Mapping[WorkerId, Mapping[str, Any]], *, worker: Worker) -> None:
        """What all have contributed to the iteration that has just ended."""
        if self.draws or not any(DRAWS in its for its in contributions.values()):
            return
        self.draws = True
        if worker.protects:
            tell_once(
                worker,
                "training_data draws random numbers for its samples. So who shadows a first or last stage reads the "
                "data, too; who takes one over without that reads it again from the beginning of the pass. Neither is "
                "needed with engine.set_data_source, whose samples are a function of pipeline and step",
            )

    # -- for workers that join, and for checkpoints ------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """As values that can be sent and saved."""
        texts = list(dict.fromkeys(text for stream in self._of.values() for text in (stream.first, stream.later)))
        ends = [
            [*end, texts.index(stream.first), texts.index(stream.later), self._from.get(end)]
            for end, stream in self._of.items()
        ]
        return {"texts": texts, "ends": ends, "settled": self._settled, "draws": self.draws, "origin": self.origin}

    def take(self, value: Mapping[str, Any]) -> None:
        """Inverse of :meth:`to_json`. Nothing from a checkpoint of an earlier version."""
        if not value.get("ends"):
            return
        texts = value["texts"]
        self._of, self._from = {}, {}
        for pipeline, last, first, later, owner in value["ends"]:
            self._of[pipeline, last] = Stream(texts[first], texts[later])
            if owner is not None:
                self._from[pipeline, last] = owner
        self._settled, self.draws = bool(value["settled"]), bool(value["draws"])
        self.origin = int(value.get("origin", 0))  # not in checkpoints of an earlier version
