"""What the engine offers to a script, beyond DeepSpeed's."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe.engine import PipelineEngine

from deepspeed_bamboo.core.grid import Coordinate, Grid
from deepspeed_bamboo.core.placement import Placement
from deepspeed_bamboo.core.slowness import DATA, SCRIPT, Cause
from deepspeed_bamboo.errors import ConfigError
from deepspeed_bamboo.eventlog.log import EventLog
from deepspeed_bamboo.runtime.at_work import at_work
from deepspeed_bamboo.runtime.checkpoint.beginning import BATCH, MICRO_OFFSET
from deepspeed_bamboo.runtime.checkpoint.last_state import LastState
from deepspeed_bamboo.runtime.checkpoint.stage_files import Around, StageFiles
from deepspeed_bamboo.runtime.comm.epoch_monitor import JobCompleteError
from deepspeed_bamboo.runtime.iteration.activity import Round
from deepspeed_bamboo.runtime.iteration.batch_of_job import refuse_another_size
from deepspeed_bamboo.runtime.iteration.data_streams import STREAMS, DataStreams
from deepspeed_bamboo.runtime.iteration.feeding import Feed
from deepspeed_bamboo.runtime.iteration.micro_batches import DataFactory, PipelineData
from deepspeed_bamboo.runtime.iteration.step_history import BatchSize
from deepspeed_bamboo.runtime.iteration.training_data import TrainingData
from deepspeed_bamboo.runtime.iteration.worker import Worker
from deepspeed_bamboo.runtime.job import garbage
from deepspeed_bamboo.runtime.job.script_clock import ScriptClock
from deepspeed_bamboo.runtime.job.session import WorkerSession
from deepspeed_bamboo.runtime.job.view import CurrentView
from deepspeed_bamboo.runtime.recovery.agreed_digest import agreed_digest
from deepspeed_bamboo.runtime.recovery.memory_rounds import MemoryRounds
from deepspeed_bamboo.runtime.recovery.whole_state import collect_whole_state
from deepspeed_bamboo.runtime.stock.hosted_view import in_thread_of_script
from deepspeed_bamboo.runtime.stock.hosting import StageHost
from deepspeed_bamboo.runtime.stock.hyperparameters import Values, values_of
from deepspeed_bamboo.runtime.stock.script_groups import ScriptGroups
from deepspeed_bamboo.runtime.stock.script_writes import ScriptWrites
from deepspeed_bamboo.runtime.stock.stock_files import StockFiles

_LAST_MESSAGES_SECONDS = 5.0


class ScriptEngine(PipelineEngine):  # type: ignore[misc]
    """The part of the engine that scripts call besides training; see the module."""

    # The engine's; whose they are is said there.
    view: CurrentView
    worker: Worker
    script_groups: ScriptGroups
    session: WorkerSession
    home: int
    job_grid: Grid
    data: PipelineData
    feed: Feed
    stage_files: StageFiles
    script_writes: ScriptWrites
    memory: MemoryRounds | None = None
    _stage_host: StageHost | None = None
    optimizer_source: Any = None
    _training_set: Any = None
    additional_losses: dict[str, float]
    before_scheduler: tuple[Any, Values] = (None, ())  # an optimizer, and its groups before it got a scheduler
    # What a call in a thread, whose end is not the process's, was refused for, until the main thread makes one.
    refused: ConfigError | None = None
    used = False  # whether it has
    _working = 0
    last_state: LastState

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Inside, the modules are DeepSpeed's and the plugin's, see :func:`at_work`; outside, they are the script's."""
        if not self._working:
            self._script_clock.enter_engine()
        self._working += 1
        try:
            yield
        finally:
            self._working -= 1
            if not self._working:
                self._script_clock.leave_engine()

    @functools.cached_property
    def data_streams(self) -> DataStreams:
        """The random numbers of ``training_data``."""
        return DataStreams()

    @functools.cached_property
    def _script_clock(self) -> ScriptClock:
        return ScriptClock()

    def _take_seconds_beside(self) -> dict[Cause, float]:
        """What this worker was busy with beside its passes since the last call, in seconds."""
        return {DATA: self.data.take_seconds(), SCRIPT: self._script_clock.take_seconds()}

    def _shown_to_script(self) -> list[PipelineModule] | None:
        """The modules that stand for the script's one, see :func:`show_all_hosted`."""
        if self._stage_host is None or not self.view.entered:
            return None
        if in_thread_of_script():
            # Training may go on meanwhile, so nothing is put aside or waited for.
            return [replica.module for replica in self.host.owners()]
        outside = threading.current_thread() is threading.main_thread() and not self._working
        return list(self.hosted_modules().values()) if outside else None

    def is_first_stage(self) -> bool:
        """Whether this worker hosts a first stage; inside of the engine's own work, whether the active stage is one."""
        return self._hosts(0, stock=super().is_first_stage)

    def is_last_stage(self) -> bool:
        """Whether this worker hosts a last stage; inside of the engine's own work, whether the active stage is one."""
        return self._hosts(self.num_stages - 1, stock=super().is_last_stage)

    def _hosts(self, stage: int, *, stock: Callable[[], bool]) -> bool:
        return any(c.stage == stage for c in self.host.owned) if self._script_asks() else bool(stock())

    def _script_asks(self) -> bool:
        """Whether whoever asks now is the script, of a worker in training, and not the engine's own work."""
        asks = in_thread_of_script() or not self._working
        return asks and self._stage_host is not None and not self.host.building and self.view.entered

    def stages_to_script(self, pipeline: int) -> tuple[int, ...]:
        """The stages of ``pipeline`` that this worker hosts, if the script asks, as by ``grid.get_stage_id()``."""
        return tuple(c.stage for c in self.host.owned if c.pipeline == pipeline) if self._script_asks() else ()

    def group_to_script(self, kind: str) -> Any:
        """The group of this ``kind`` in which this worker's script began, if the script asks; else None."""
        if not self._script_asks():
            return None
        rank = self.worker.links.members[self.worker.me].home % len(self.job_grid)
        home = self.job_grid.coordinate(rank)
        ranks = [
            self.job_grid.rank(c)
            for c in self.job_grid
            if (c.stage == home.stage if kind == "data" else c.pipeline == home.pipeline)
        ]
        return self.script_groups.of_grid(kind, ranks, ranks.index(rank))

    def hosted_modules(self) -> dict[Coordinate, PipelineModule]:
        """The modules of all stages that this worker hosts now, by coordinate; see :meth:`StageHost.hosted`.

        The script's own module (``engine.module``) shows them all in ``parameters()`` and the like.
        """
        return dict(self.host.hosted("module"))

    def hosted_optimizers(self) -> dict[Coordinate, Any]:
        """Likewise the optimizers, for what concerns all parameters: state, ``state_dict()``, ``load_state_dict()``."""
        return dict(self.host.hosted("optimizer"))

    def hosted_schedulers(self) -> dict[Coordinate, Any]:
        """Likewise the schedulers. One of the script's own is with one stage; the others have None."""
        return dict(self.host.hosted("lr_scheduler"))

    def cause_of(self, error: Exception) -> ConfigError | None:
        """What ``error``, which the script has raised, comes from, where the plugin knows better than its text."""
        return None

    @at_work
    def close(self) -> None:
        """End the job after a last agreement that everybody is done. Called when the script ends; once is enough."""
        if self.session.closed:
            return
        self.last_state.keep_at_close()
        # Once all have come here somebody may leave before all know it, or be lost on the way: the job says so, too.
        with contextlib.suppress(JobCompleteError), self.session.interruption.ending_when_complete():
            self.worker.agree_on("close", lambda: None)
        self.session.finish(step=self.global_steps)
        self.leave()

    def leave(self) -> None:
        """Leave the job at once; the others need this worker no more."""
        if self.memory is not None:
            self.memory.close()
        if self.session.closed:
            return
        self._whereabouts.close()
        # The first worker's last messages must be out before its process is.
        self.links.flush(within_seconds=_LAST_MESSAGES_SECONDS)
        self.links.close()
        self.session.close()
        garbage.take_back()

    def set_dataloader(self, loader: Any) -> None:
        """Every worker keeps its own copy of the data position, since it may inherit the first or last stage."""
        self.set_dataiterator(iter(loader))
        self.training_dataloader = loader

    def set_dataiterator(self, iterator: Iterator[Any] | None) -> None:
        """See :meth:`set_dataloader`."""
        self.training_dataloader = None
        self.data.set_iterator(iterator)
        self.data_iterator = iterator

    def set_data_source(self, training: DataFactory, *, evaluation: DataFactory | None = None) -> None:
        """Say where the data of any pipeline come from, for when this worker hosts stages of another pipeline.

        ``training(pipeline, step)`` returns an iterator over that pipeline's micro-batches from ``step`` on,
        ``evaluation`` the same for ``eval_batch``. Call it on every rank, before training; iterators passed to
        ``train_batch`` are still used for this worker's first pipeline. ``training_data`` needs none of this.
        """
        self.feed.set_source(training, evaluation=evaluation)

    def _next_batch(self) -> Any:
        return self.feed.next_batch()

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """As stock's. Raises ConfigError where the engine reads ``training_data``, whose loader keeps its size."""
        if self._training_set is not None:
            refuse_another_size(micro_batch_size, now=self.train_micro_batch_size_per_gpu())
        super().set_train_micro_batch_size(micro_batch_size)

    def reset_activation_shape(self) -> None:
        """As stock's: what stages send each other from now on may have another shape."""
        super().reset_activation_shape()
        self.worker.links.forget_forms()

    def _batch_size(self) -> BatchSize:
        return int(self.train_batch_size()), int(self.train_micro_batch_size_per_gpu())

    def _change_batch(self, samples: int, of_micro_batch: int) -> None:
        self.set_train_micro_batch_size(of_micro_batch)
        self.set_train_batch_size(samples)

    def complete_data(self) -> None:
        """Pull what others need of this iteration's data."""
        self.feed.complete()

    def _build_data_iter(self, dataset: Any) -> None:
        self.data_streams.begin()
        super()._build_data_iter(dataset)
        self._training_set = dataset

    def calls_alone(self) -> bool:
        """Whether a collective that the script calls now concerns this worker alone, see ``catching_up.py``."""
        return False

    def _make_feed(self) -> Feed:
        """Tell what the user gave to ``initialize`` from what belongs to one pipeline only."""
        given, self.data = self.data, PipelineData(self.home)
        if self._training_set is None:
            self.data.set_iterator(given.iterator)
        feed = Feed(
            self.worker,
            data=self.data,
            home=self.home,
            transform=lambda: self.batch_fn,
            batch=self.batch_of_job,
            used=lambda: int(self.global_samples // (self.micro_batch_size * self.job_grid.pipelines)),
            call_of=self.beginning.call_of,
            exchanges=lambda: self.script_server.exchanges,
        )
        if self._training_set is not None:
            feed.set_training_data(TrainingData(self, self._training_set, streams=self.data_streams))
        return feed

    def _make_stage_files(self) -> StageFiles:
        """The part that saves and loads, on top of what stock's engine does for one stage."""
        stock: Any = super()
        return StageFiles(
            self.worker,
            stock=StockFiles(stock, attributes=self.__dict__),
            transfer=self.transfer,
            beginning=self.beginning,
            around=Around(
                data=lambda: self.data,
                numbers=lambda: {
                    "seed": self.forward_seed,
                    "loss": self.mean_loss,
                    **self.last_state.to_json(wrote=self.script_writes.has_written),
                    STREAMS: self.data_streams.to_json(),
                    BATCH: self.batch_of_job.to_json(),
                    MICRO_OFFSET: max((its.micro_offset for its in self.worker.host.replicas()), default=0),
                },
                repair=lambda: self.redundancy_repair.repair(),
                make_alike=self.owner_changes.make_alike,
                loaded=self._after_load,
                alike=self.owner_changes.note,
            ),
        )

    def _after_load(self) -> None:
        """There is no way back to the states of before, and those of later steps count no more."""
        if self.checkpoints is not None:
            self.checkpoints.rounds.go_back(self.worker.step)
        self.redoing.forget()

    @at_work
    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """As stock's, and surviving losses; every worker calls it. Returns True.

        The file ``latest`` changes, at once, only when all stages are on disk, and with them a manifest that has the
        checksum of each file (none with a checkpoint engine that writes later).
        """
        options = {"exclude_frozen_parameters": exclude_frozen_parameters}
        state = {} if client_state is None else client_state
        self.stage_files.save(save_dir, tag, client_state=state, latest=save_latest, options=options)
        return True

    @at_work
    def load_checkpoint(
        self, load_dir: str | os.PathLike[str], tag: str | None = None, *arguments: Any, **options: Any
    ) -> tuple[str | None, Any]:
        """As stock's, and surviving losses; every worker calls it, between iterations. Shadows get what owners read.

        Where a checkpoint has a manifest its files are checked first. Without ``tag`` the newest whole one is taken if
        the one that ``latest`` names is damaged; a warning says what is wrong with it. Returns (None, None), and says
        so, only where nothing was ever saved.

        Raises CheckpointError when ``tag`` is damaged, when no checkpoint is whole, and when some workers find a
        checkpoint and others none, or another one.
        """
        self.last_state.keep_before_load(stopped=self.reconfiguration.stop_agreed)
        return self.stage_files.load(load_dir, tag, arguments=arguments, options=options)

    def refresh_shadows(self) -> None:
        """Give shadows the state of their owners; collective, between iterations.

        Needed only where a script changes weights or optimizer state itself after ``initialize``: training and
        ``load_checkpoint`` keep shadows up to date.
        """
        self.stage_files.refresh_shadows()

    def _save_checkpoint(self, save_dir: str, tag: str, **options: Any) -> None:
        """Called by stock in the middle of saving."""
        self.stage_files.save_all(save_dir, tag, **options)

    def _save_zero_checkpoint(self, save_path: str, tag: str) -> None:
        """Called by stock after the above, which has done it."""

    def _copy_recovery_script(self, save_path: str) -> None:
        """Stock's; it writes into the directory itself, which what is captured does not have."""
        if not self.stage_files.captures:
            super()._copy_recovery_script(save_path)

    def _load_checkpoint(self, load_dir: str, tag: str, **options: Any) -> tuple[str | None, Any]:
        """Called by stock in the middle of loading."""
        return self.stage_files.load_files(load_dir, tag, **options)

    def _configure_optimizer(self, client_optimizer: Any, model_parameters: Any) -> None:
        """As stock's, also after ``initialize``; the shadows follow before the next step."""
        host = self._stage_host
        if host is None or not host.building:
            self.optimizer_source = client_optimizer
        if host is None or host.building:
            super()._configure_optimizer(client_optimizer, model_parameters)
            return
        with self.working():
            host.building = True  # nobody else takes part
            try:
                super()._configure_optimizer(client_optimizer, model_parameters)
            finally:
                host.building = False
            host.adopt_optimizer()
        self.script_writes.hold(self.optimizer)

    def _configure_lr_scheduler(self) -> None:
        """As stock's. Schedulers may read the groups' rates as they are made, and change them at once."""
        optimizer = self.__dict__.get("basic_optimizer")
        if isinstance(optimizer, torch.optim.Optimizer):
            self.before_scheduler = (optimizer, values_of(optimizer))
        super()._configure_lr_scheduler()

    def zero_force_ds_cpu_optimizer(self) -> bool:
        """As stock's, which asks where it was given an optimizer: a replica's is given though the script gave none."""
        return self.optimizer_source is not None and bool(super().zero_force_ds_cpu_optimizer())

    def whole_state_dict(self) -> dict[str, torch.Tensor]:
        """The weights and buffers of the whole model by name, on the host of the worker that is the reporter.

        Collective: every worker calls it, between iterations; all but the reporter get an empty dict. Names are those
        of ``named_parameters()``, tensors are copies. A loss meanwhile is survived. With several pipelines, which hold
        the same, it is the first one's.
        """
        return collect_whole_state(self.worker)

    @property
    def is_reporter(self) -> bool:
        """True on exactly one live worker: the one that should print and merge logs, and stands for rank 0."""
        return self.worker.is_reporter

    @property
    def leads(self) -> bool:
        """True on the one live worker that decides for all and names checkpoints, see ``core/roles.py``."""
        return self.worker.leads

    @property
    def placement(self) -> Placement:
        """Who hosts and shadows what now. Raises RuntimeError before the job's first epoch."""
        return self.worker.placement

    @property
    def epoch(self) -> int:
        """Number of the current epoch; it grows by one with every change of membership."""
        return self.worker.epoch

    @property
    def event_log(self) -> EventLog:
        """This worker's event log."""
        return self.session.events

    def barrier(self) -> None:
        """Wait until every live worker has come here; survives losses."""
        self.worker.agree_on("barrier", lambda: None)

    def agree_on(self, kind: str, value: Callable[[], Any]) -> Round:
        """An all-gather that survives losses: what ``value`` returns on each live worker, by worker.

        Collective, between iterations. ``kind`` names the call, the same on all. After a loss ``value`` is called
        again, unless somebody has seen the result already. Values are plain data and tensors. ``value`` sees modules,
        ranks and stages as the script does between two calls, those of stages that were just taken over, too.
        """

        def seen_by_script() -> Any:
            aside, self._working = self._working, 0
            try:
                return value()
            finally:
                self._working = aside

        return self.worker.agree_on(kind, seen_by_script)

    @property
    def finished(self) -> bool:
        """True once the job is complete, or was asked to stop: there is no further iteration, leave the loop."""
        return bool(self.session.finished or self.last_state.note(self.reconfiguration.stop_agreed))

    def log_event(self, event: str, **fields: Any) -> None:
        """Write an event to this worker's event log, with the current step and epoch."""
        self.worker.log_event(event, **fields)

    def state_digest(self) -> str:
        """One sha256 over all parameters and optimizer state in layer order, whatever the placement.

        Collective: every worker calls it, between iterations; all get the same value.
        """
        return agreed_digest(host=self.host, grid=self.job_grid, agree_on=self.worker.agree_on)
