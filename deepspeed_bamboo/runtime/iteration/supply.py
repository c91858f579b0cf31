"""Sends micro-batches to workers that need them and have no iterator, see :mod:`deepspeed_bamboo.core.supplying`.

A feeder pulls an iteration's micro-batches at its beginning, keeps them to its end anyway, and sends each receiver the
part that it needs. A receiver takes each one when it loads it, and keeps it until its stage has used it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from deepspeed_bamboo.coordination import lost_data
from deepspeed_bamboo.core.grid import Coordinate
from deepspeed_bamboo.core.supplying import (
    Claim,
    Delivery,
    Table,
    by_iterator_first,
    deliveries,
    feeders,
    read_with_messages,
    trusted,
    unlike,
    unsafe_ends,
)
from deepspeed_bamboo.errors import ConfigError
from deepspeed_bamboo.runtime.comm.channel import Message
from deepspeed_bamboo.runtime.comm.layout import in_layout, layout_of
from deepspeed_bamboo.runtime.iteration.micro_batches import PipelineData, missing_data
from deepspeed_bamboo.runtime.iteration.worker import Worker
from deepspeed_bamboo.runtime.job.giving_up import give_up
from deepspeed_bamboo.runtime.job.news import tell, tell_once

if TYPE_CHECKING:
    from deepspeed_bamboo.coordination import EpochRecord


class DataSupply:
    """One worker's side of it, for training or for one evaluation.

    Args:
        worker: whose placement counts.
        data: returns what this worker has itself.
        transform: returns what the script has the engine do to each batch, or None.
        table: the pipelines that each worker has the data of, where that is known.
        iterators: those of which its script's iterator has them, where these come first.
        evaluation: what was said of evaluations' data before; None: it is that of training.
        had: by pipeline who had its data when anybody did last, kept from one evaluation to the next.
        exchanges: whether the script has sent or received messages between ranks.
    """

    def __init__(
        self,
        worker: Worker,
        *,
        data: Callable[[], PipelineData],
        transform: Callable[[], Callable[[Any], Any] | None],
        table: Table | None = None,
        iterators: Table | None = None,
        evaluation: set[tuple[int, int]] | None = None,
        had: dict[int, frozenset[str]] | None = None,
        exchanges: Callable[[], bool] = lambda: False,
    ) -> None:
        self._exchanges = exchanges
        self._evaluates = evaluation is not None
        self._worker = worker
        self._data = data
        self._transform = transform
        self._had: dict[int, frozenset[str]] = {} if had is None else had
        self._table: dict[str, Any] = {}
        self._note_table(table or {})
        self._iterators = iterators
        self._expected: dict[int, Delivery] = {}
        self._taken: dict[tuple[int, int], Any] = {}
        # A pipeline, and how many had its data.
        self._said: set[tuple[int, int]] = set() if evaluation is None else evaluation

    def own(self) -> tuple[int, ...]:
        """The pipelines that this worker has the data of."""
        data = self._data()
        return tuple(pipeline for pipeline in range(self._worker.grid.pipelines) if data.has(pipeline))

    def agree(self) -> None:
        """Before an iteration: know who has data, once and again when workers have come; then on all workers alike.

        Raises ConfigError on all of them when a loss could not be survived for want of data.
        """
        record = self._worker.record
        if not self._worker.protects:
            return
        if not set(record.members) <= self._table.keys():
            claims = {w: Claim.from_json(its) for w, its in self._worker.agree_on("data", self._claim).items()}
            self._note_table(trusted(claims))
            self._learn_who_is_trusted(claims)
            if not any(claim.known for claim in claims.values()):  # the job begins
                self._check(self._worker.record)
                self._say_what_is_unlike(claims)
                self._say_whether_training_data_differ(claims)
                self._say_who_reads_with_messages(claims)
        self._distrust_what_begins_late()
        self.say_who_is_the_last()

    def _note_table(self, table: Table) -> None:
        self._table = dict(table)
        for pipeline in range(self._worker.grid.pipelines):
            self._had[pipeline] = frozenset(w for w, its in table.items() if pipeline in its) or self._had.get(
                pipeline, frozenset()
            )

    def _claim(self) -> tuple[object, ...]:
        data = self._data()
        first = data.first(step=self._worker.step, transform=self._transform())
        return Claim(self.own(), tuple(self._table), first, data.several, data.guesses, self._exchanges()).to_json()

    def _learn_who_is_trusted(self, claims: Mapping[str, Claim]) -> None:
        for worker, claim in claims.items():
            if claim.own == self._table[worker]:
                continue
            if worker == self._worker.me:
                self._data().distrusted = True
            tell_once(
                self._worker,
                f"{worker} came late, and its data iterator is not where the others' are, or may not stay there: "
                "it gets its data from them. In a loop by engine.global_steps nobody can know which epoch an iterator "
                "is of, or what else was taken from it; a script that counts its steps, or training_data, shows it",
            )

    def _distrust_what_begins_late(self) -> None:
        """A script may pass data where its worker hosts an end: so first after a loss, and from their start."""
        me, data = self._worker.me, self._data()
        if data.covers_every_pipeline or set(self.own()) <= set(self._table[me]):
            return
        data.distrusted = True
        tell(
            self._worker,
            f"the script of {me} passes a data iterator for the first time in step {self._worker.step}: nobody can "
            "know whether it is where the others' are, so it is not read, and others send their data. Pass an iterator "
            "on every rank from the first step on, or None where there was none",
        )

    def _check(self, record: EpochRecord) -> None:
        for coordinate in unsafe_ends(record.placement, self._table, members=record.members):
            holder = record.placement.shadow(coordinate)
            raise missing_data(
                worker=str(holder),
                pipeline=coordinate.pipeline,
                home=self._home_of(str(holder), record),
                why=f"may have to take {coordinate} over",
            )

    def _say_what_is_unlike(self, claims: Mapping[str, Claim]) -> None:
        for pipeline, (one, other) in unlike(claims).items():
            tell_once(
                self._worker,
                f"the data iterators of {one} and {other} begin with different micro-batches of pipeline {pipeline}: "
                "a worker that takes a first or last stage over would train on other data than the lost one. Yield the "
                "same inputs and labels on every rank that has an iterator, with no zeros in place of what its stage "
                "doesn't need, and no seed by rank. A DataLoader draws its order, and a seed for its samples, from "
                "torch's generator of its rank: give it "
                "generator=torch.Generator().manual_seed(N) on every rank, or pass training_data to initialize",
            )

    def _say_whether_training_data_differ(self, claims: Mapping[str, Claim]) -> None:
        """An iterator is read where there is one. Who takes over in another pipeline, or comes late, reads those."""
        if self._transform() is not None:
            return  # what it keeps would move
        read = claims[self._worker.me].first
        made = self._data().first_made(step=self._worker.step) if read else {}
        for pipeline in (pipeline for pipeline, checksum in made.items() if read[pipeline] != checksum):
            tell(
                self._worker,
                f"the data iterator of {self._worker.me} begins with another micro-batch of pipeline {pipeline} than "
                "the training_data of initialize. The iterator is read here; a worker that takes an end of another "
                "pipeline over, comes late or begins again reads training_data: it would train on other data. Call "
                "train_batch() without an iterator, or have both yield the same",
            )

    def _say_who_reads_with_messages(self, claims: Mapping[str, Claim]) -> None:
        for coordinate, owner, holder in read_with_messages(self._worker.record.placement, claims):
            tell_once(
                self._worker,
                f"the script of {owner} reads data, and ranks send each other messages meanwhile; that of {holder}, "
                f"which holds the shadow of {coordinate}, does neither. After the loss of {owner} it begins to read, "
                "and where it then waits for a message of before, the job ends. Have every rank read, with its part in "
                "these messages, from the first step on",
            )

    @staticmethod
    def _home_of(worker: str, record: EpochRecord) -> int:
        hosted = record.placement.hosted_by(worker)
        return hosted[0].pipeline if hosted else -1

    def say_who_is_the_last(self) -> None:
        """Which loss would take the last one that has the data of a pipeline; each time that another one would."""
        record = self._worker.record
        for pipeline in range(self._worker.grid.pipelines):
            left = feeders(pipeline, self._table, members=record.members)
            text = _worth_saying(left, pipeline, record, evaluates=self._evaluates)
            if text is not None and (pipeline, len(left)) not in self._said:
                tell_once(self._worker, text)
            if text is not None or len(left) > 1:
                self._said.difference_update([known for known in self._said if known[0] == pipeline])
            if text is not None:
                self._said.add((pipeline, len(left)))

    def deliver(self, *, micro_batches: int, beforehand: bool) -> None:
        """At the beginning of every attempt: send what others need, and know what this worker gets.

        Where nobody is left who has what somebody needs, this is what :func:`give_up` says; raises ConfigError where
        nobody ever had it.
        """
        worker, me = self._worker, self._worker.me
        self._expected, self._taken = {}, {}
        if not worker.protects:
            return
        record = self._worker.record
        table: Table = self._table
        if self._iterators is not None:
            every = range(worker.grid.pipelines)
            table = by_iterator_first(self._iterators, table, pipelines=len(every), members=record.members)
            self._data().leave_to_others(p for p in every if p not in table[me])
        try:
            planned = deliveries(worker.placement, table, members=record.members, beforehand=beforehand)
        except LookupError as error:
            self._give_up(record, error.args[0])
            what, source = self._words
            raise ConfigError(
                f"nobody has the {what} of {error.args[0]} (pipeline.stage): pass an iterator on every rank, or call "
                f"engine.set_data_source{source} on every rank"
            ) from error
        # All channels at once, by those at both ends: one by one, workers could wait for each other in a circle.
        worker.links.meet(
            {its.receiver for its in planned if its.feeder == me}
            | {its.feeder for its in planned if its.receiver == me}
        )
        for delivery in planned:
            if delivery.receiver == me:
                self._expected[delivery.pipeline] = delivery
            elif delivery.feeder == me:
                self._send(delivery, micro_batches)

    @property
    def _words(self) -> tuple[str, str]:
        return ("evaluation data", "(..., evaluation=...)") if self._evaluates else ("data", "")

    def _give_up(self, record: EpochRecord, coordinate: Coordinate) -> None:
        """The last one that had the data of ``coordinate`` was lost: no fault of the script's, as another loss is none.

        Nothing where nobody ever had them, or somebody here has had them. Else raises what :func:`give_up` raises.
        """
        lost = sorted(self._had[coordinate.pipeline])
        if not lost or not set(lost).isdisjoint(record.members):
            return
        what, source = self._words
        why = (
            f"nobody is left who has the {what} of {coordinate} (pipeline.stage): {', '.join(lost)}, whose iterators "
            f"had them, {'was' if len(lost) == 1 else 'were'} lost. Pass an iterator on every rank, or call "
            f"engine.set_data_source{source} on every rank, and a job goes on as long as one worker is left"
        )
        failure = lost_data(lost[0], why, stores=record.stores)
        give_up(self._worker.session, record, failure=failure, why=f"since {why}")

    def _send(self, delivery: Delivery, micro_batches: int) -> None:
        worker, data = self._worker, self._data()
        for micro_batch in range(micro_batches):
            batch = data.get(delivery.pipeline, micro_batch, step=worker.step, transform=self._transform())
            part = (batch[0] if delivery.inputs else None, batch[1] if delivery.labels else None)
            tensors: list[torch.Tensor] = []
            form = _form(part, tensors, where=f"micro-batch {micro_batch} of pipeline {delivery.pipeline}")
            worker.links.send(delivery.receiver, Message(self._key(delivery, micro_batch), form, tensors))

    def has(self, pipeline: int) -> bool:
        """Whether this worker is sent the data of ``pipeline``."""
        return pipeline in self._expected

    def take(self, pipeline: int, micro_batch: int) -> Any:
        """The micro-batch, with None for the part that is not needed here. Raises what interrupts a wait."""
        if (pipeline, micro_batch) not in self._taken:
            delivery = self._expected[pipeline]
            message = self._worker.links.receive(delivery.feeder, self._key(delivery, micro_batch))
            device = self._worker.device
            self._taken[pipeline, micro_batch] = _value(message.data, [t.to(device) for t in message.tensors])
        return self._taken[pipeline, micro_batch]

    def _key(self, delivery: Delivery, micro_batch: int) -> str:
        return f"{self._worker.activity.index}/data/{delivery.pipeline}/{micro_batch}"


def _worth_saying(left: Sequence[str], pipeline: int, record: EpochRecord, *, evaluates: bool) -> str | None:
    """Which loss would take the last one that has the data of ``pipeline``, though its stages would survive it."""
    others = len(record.members) > len(left)
    ends = "has all workers start anew" if record.waits_seconds else "ends the job"
    # Of several pipelines each has its own; the first one stands for all.
    if evaluates and others and (len(left) == 1 or (left and pipeline == 0 and record.placement.grid.pipelines > 1)):
        return (
            f"only {' and '.join(left)} {'has' if len(left) == 1 else 'have'} the evaluation data of pipeline "
            f"{pipeline}: once no worker has them, the next eval_batch {ends}. Give each rank those of all "
            "pipelines: engine.set_data_source(..., evaluation=lambda pipeline, step: iterator)"
        )
    if len(left) == 1 and others:
        return f"only {left[0]} has the data of pipeline {pipeline}: its loss {ends}"
    if len(left) == 2 and others and record.placement.copies > 1:
        return (
            f"only {' and '.join(left)} have the data of pipeline {pipeline}: the loss of both at once {ends}, "
            "whatever shadows there are. Pass an iterator on every rank, or call engine.set_data_source"
        )
    return None


def _form(value: Any, tensors: list[torch.Tensor], *, where: str) -> Any:
    """``value`` as plain data, with its tensors put into ``tensors``. Raises ConfigError for what can't be sent."""
    if isinstance(value, torch.Tensor):
        tensors.append(value.detach())
        return ["tensor", len(tensors) - 1, layout_of(value)]
    if isinstance(value, (list, tuple)):
        kind = "list" if isinstance(value, list) else "tuple"
        return [kind, *(_form(part, tensors, where=where) for part in value)]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return ["dict", *([key, _form(part, tensors, where=where)] for key, part in value.items())]
    if value is None or isinstance(value, (bool, int, float, str)):
        return ["plain", value]
    raise ConfigError(
        f"{where} has a {type(value).__name__} in it, which can't be sent to a worker that has no data iterator; yield "
        "tensors in lists, tuples or dicts, or pass an iterator on every rank"
    )


def _value(form: Any, tensors: list[torch.Tensor]) -> Any:
    """Inverse of :func:`_form`."""
    kind, *parts = form
    if kind == "tensor":
        return in_layout(tensors[parts[0]], parts[1])
    if kind == "plain":
        return parts[0]
    if kind == "dict":
        return {key: _value(part, tensors) for key, part in parts}
    values = [_value(part, tensors) for part in parts]
    return values if kind == "list" else tuple(values)
