"""The plugin's own checkpoints as a state that survivors of a fatal loss go back to, in their processes."""

from __future__ import annotations

import base64
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from deepspeed_bamboo.core.grid import Coordinate
from deepspeed_bamboo.errors import CheckpointError, MessageError, UnsendableError
from deepspeed_bamboo.runtime.checkpoint.automatic import STATE, AutomaticCheckpoints
from deepspeed_bamboo.runtime.checkpoint.checking_together import choose_together, tell_choice
from deepspeed_bamboo.runtime.checkpoint.safe_loading import UNREADABLE
from deepspeed_bamboo.runtime.comm.encoding import decode, encode
from deepspeed_bamboo.runtime.iteration.worker import Worker
from deepspeed_bamboo.runtime.job.news import tell_once
from deepspeed_bamboo.runtime.recovery.sources import Together
from deepspeed_bamboo.runtime.recovery.stage_state import pack_rest
from deepspeed_bamboo.runtime.stock.description import Description
from deepspeed_bamboo.runtime.stock.replica import StageReplica
from deepspeed_bamboo.storage.checking import Survey
from deepspeed_bamboo.storage.place import step_of, tag_of

IN_PLACE = "in_place"
"""Under which key a stage's file has, in the plugin's own state, what a replica made in a running job needs besides."""

Ready = Callable[[Coordinate, Callable[[], Description]], StageReplica]
"""From a coordinate, and a function that returns its description, to the replica that is to get its state."""
LoadStage = Callable[[Coordinate, str, str, Ready], None]
"""From a coordinate, a directory and a tag in it: brings the replica to that state."""


def rest_to_text(replica: StageReplica, description: Description) -> str | None:
    """What DeepSpeed's files lack of ``replica``; None where something of it can't be written."""
    rest = tree_map_only(torch.Tensor, lambda tensor: tensor.detach().to("cpu"), pack_rest(replica))
    try:
        return base64.b64encode(encode([rest, description])).decode("ascii")
    except UnsendableError:
        return None


def rest_from(loaded: Mapping[str, Any] | None) -> tuple[dict[str, Any], Description]:
    """Inverse of :func:`rest_to_text`, from what a file has. Raises CheckpointError where it has nothing of it."""
    text = ((loaded or {}).get(STATE) or {}).get(IN_PLACE)
    if text is None:
        raise CheckpointError(
            "it lacks what a running job needs (it is of an earlier version, or a layer has a value "
            "that can't be written)"
        )
    try:
        rest, description = decode(base64.b64decode(text))
    except (MessageError, ValueError) as error:
        raise CheckpointError(f"what a running job needs of it can't be read ({error})") from error
    return rest, description


class StoredStates:
    """See ``recovery/sources.py``, ``Store``.

    Args:
        worker: whose stages get the state.
        checkpoints: the job's.
        load: loads one stage.
    """

    def __init__(self, worker: Worker, checkpoints: AutomaticCheckpoints, load: LoadStage) -> None:
        self._worker = worker
        self._rounds = checkpoints.rounds
        self._place = checkpoints.place
        self._load = load
        self._others: frozenset[int] = frozenset()  # not of this training as it has become

    @property
    def name(self) -> str:
        """As people call it."""
        return self._place.name

    @property
    def known(self) -> tuple[int, ...]:
        """The steps of the complete checkpoints that are of this training, as far as this worker knows, in order."""
        return tuple(step for step in self._rounds.progress.kept if step not in self._others)

    @property
    def wanted(self) -> tuple[int, ...]:
        """The steps that may be gone back to, now or when the checkpoint in progress is complete."""
        return tuple(step for step in self._all() if step not in self._others)

    def _all(self) -> Iterable[int]:
        progress = self._rounds.progress
        return (*progress.kept, *(() if progress.current is None else (progress.current,)))

    # -- what is of this training ------------------------------------------------------------------

    def forget(self) -> None:
        """The state has become another one otherwise than by training: there is no way back to before."""
        self._others = frozenset(self._all())

    def began_from(self, step: int) -> None:
        """The state is that of the checkpoint of ``step``."""
        self._others -= {step}

    def to_json(self) -> list[int]:
        """What a worker that joins has to know."""
        return sorted(self._others)

    def take(self, value: Iterable[int]) -> None:
        """Inverse of :meth:`to_json`."""
        self._others = frozenset(map(int, value))

    # -- going back --------------------------------------------------------------------------------

    def choose(self, together: Together, steps: Collection[int]) -> int | None:
        """The newest of ``steps`` of which all workers can read a whole checkpoint, None where none is; collective."""
        tags, grid = {tag_of(step) for step in steps}, (self._worker.grid.pipelines, self._worker.grid.stages)

        def survey() -> Survey:
            there = [candidate for candidate in self._place.survey().candidates if candidate.tag in tags]
            whole = [c for c in there if c.problems or (c.manifest is not None and c.manifest.grid == grid)]
            return Survey(whole[0].tag if whole else None, tuple(whole))

        try:
            choice = choose_together(
                together,
                survey=survey,
                look=lambda found, share: self._place.problems_of(found, share=share),
                where=self.name,
            )
        except CheckpointError as error:
            tell_once(self._worker, f"checkpoints: {error}")
            return None
        tell_choice(self._worker, choice, where=self.name)
        for tag in choice.damaged:
            self.distrust(step_of(tag))
        if choice.error:
            tell_once(self._worker, f"checkpoints: {choice.error}")
        return None if choice.tag is None else step_of(choice.tag)

    def distrust(self, step: int | None) -> None:
        """The checkpoint of ``step`` can't be loaded: it is not one of those that are known to be whole."""
        if step is not None:
            self._rounds.distrust([step])

    def load(self, step: int, coordinates: Collection[Coordinate], replica: Ready) -> str:
        """Bring the stages of ``coordinates`` to their state of ``step``; returns what is wrong if that fails."""
        tag = tag_of(step)
        try:
            with self._place.local(tag) as directory:
                for coordinate in coordinates:
                    self._load(coordinate, str(directory), tag, replica)
        except UNREADABLE as error:
            return f"{type(error).__name__}: {error}"
        return ""
