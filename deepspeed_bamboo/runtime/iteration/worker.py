"""What most parts of the runtime share: this worker's place in the job, its stages, its links, its agreements.

It knows nothing about DeepSpeed's engine. Whatever else a part needs, it takes as arguments of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from deepspeed_bamboo.coordination import EpochRecord
from deepspeed_bamboo.core import roles
from deepspeed_bamboo.core.grid import Coordinate, Grid
from deepspeed_bamboo.core.peers import staying_first
from deepspeed_bamboo.core.placement import Placement, WorkerId
from deepspeed_bamboo.core.script_ranks import reporter
from deepspeed_bamboo.runtime.comm.all_gather import agree
from deepspeed_bamboo.runtime.comm.peers import Links
from deepspeed_bamboo.runtime.iteration.activity import ActivityState, Round
from deepspeed_bamboo.runtime.job.session import WorkerSession
from deepspeed_bamboo.runtime.job.view import CurrentView
from deepspeed_bamboo.runtime.stock.hosting import StageHost
from deepspeed_bamboo.runtime.stock.script_call import refuse_inside

Perform = Callable[[str, Callable[[], None]], None]


@dataclass(frozen=True)
class Numbers:
    """What changes from step to step, or by what the script calls, each read when it is needed.

    ``step`` counts completed iterations, ``micro_batches`` is how many an iteration has. ``confined``: a worker has the
    data of its own pipeline only. ``attempt``: how often a coordinate has changed hands in a step.
    """

    step: Callable[[], int]
    micro_batches: Callable[[], int]
    confined: Callable[[], bool]
    attempt: Callable[[Coordinate, int], int]


@dataclass(frozen=True)
class Worker:
    """One worker of a job; see the module.

    Args:
        session: its connection to the job.
        links: its channels to the others.
        host: the stages that it holds.
        activity: where it stands in the sequence of activities.
        view: the current epoch and placement.
        grid: the user's grid.
        device: where its stages live.
        numbers: what changes from step to step.
        perform: runs a function as the next activity, again after every loss until it gets through.
    """

    session: WorkerSession
    links: Links
    host: StageHost
    activity: ActivityState
    view: CurrentView
    grid: Grid
    device: torch.device
    numbers: Numbers
    perform: Perform

    @property
    def me(self) -> WorkerId:
        """This worker's id."""
        return self.session.worker

    @property
    def record(self) -> EpochRecord:
        """The epoch. Raises RuntimeError before the first."""
        return self.view.now.record

    @property
    def placement(self) -> Placement:
        """Who hosts and shadows what now."""
        return self.view.now.placement

    @property
    def epoch(self) -> int:
        """Number of the epoch; -1 before the first."""
        return self.view.now.epoch if self.view.entered else -1

    @property
    def step(self) -> int:
        """Completed iterations."""
        return self.numbers.step()

    @property
    def micro_batches(self) -> int:
        """How many micro-batches an iteration has."""
        return self.numbers.micro_batches()

    @property
    def protects(self) -> bool:
        """True when the job keeps shadows."""
        return self.session.config.redundancy.mode != "off"

    @property
    def confined(self) -> bool:
        """True where a worker has the data of its own pipeline only: nobody else can do its first and last stages."""
        return self.numbers.confined()

    @property
    def is_reporter(self) -> bool:
        """True on exactly one live worker: the one that should print and merge logs, and stands for rank 0."""
        return self.view.entered and reporter(self.record.placement) == self.me

    @property
    def leads(self) -> bool:
        """True on the one live worker that decides for all and names checkpoints, see ``core/roles.py``."""
        return self.view.entered and roles.reporter(self.record.members) == self.me

    def protected(self, workers: Iterable[WorkerId]) -> Placement:
        """The placement with a shadow for every coordinate that one of ``workers`` can stand in for."""
        return self.placement.protected(workers, confined=self.confined)

    def agree(
        self,
        value: Any,
        *,
        among: Container[str] | None = None,
        leaving: Container[str] = (),
        meanwhile: Callable[[], None] | None = None,
    ) -> Round:
        """An all-gather: everybody's value by worker; nobody sees it before all have given theirs.

        ``among``: of these only. Those who stay get it from each other, not from one of ``leaving``. ``meanwhile`` is
        called while others' values are on their way. Raises what interrupts the wait.
        """
        # With the kind: workers in different calls must not take each other's values for their own call's.
        label = f"{self.activity.index}/{len(self.activity.rounds)}/{self.activity.kind}"
        members = staying_first(self.record.members, leaving=leaving)
        workers = [worker for worker in members if among is None or worker in among]
        return agree(value, links=self.links, me=self.me, workers=workers, label=label, meanwhile=meanwhile)

    def agree_on(self, kind: str, value: Callable[[], Any]) -> Round:
        """As the next activity: an all-gather of what ``value`` returns.

        After a loss ``value`` is called again, unless somebody has seen the result already. Raises ConfigError within
        another activity, where a layer or an iterator of the script may have called it.
        """
        refuse_inside(self.activity.kind, call=kind)

        def body() -> None:
            if not self.activity.rounds:
                self.activity.rounds.append(self.agree(value()))

        self.perform(kind, body)
        return self.activity.previous[0]

    def log_event(self, event: str, **fields: Any) -> None:
        """Write an event to this worker's event log, with the current step and epoch."""
        self.session.log(event, step=self.step, **fields)

    def strike_if_scripted(
        self, coordinate: Coordinate, at: str, micro_batch: int | None = None, *, step: int | None = None
    ) -> None:
        """Carry out the scripted fault of this instruction, if there is one. ``step``: the current one if not given."""
        step = self.step if step is None else step
        fault = self.session.faults.match(
            step=step,
            pipeline=coordinate.pipeline,
            stage=coordinate.stage,
            at=at,
            micro_batch=micro_batch,
            attempt=self.numbers.attempt(coordinate, step),
        )
        if fault is not None:
            self.session.strike(fault, step=step)
