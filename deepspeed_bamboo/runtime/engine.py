"""DeepSpeed's pipeline engine, made to survive the loss of any worker inside the running iteration.

Stock methods do all computing. This engine decides who hosts a stage and how stages talk to each other, and can give
up and plan again everything that a worker waits for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from deepspeed_bamboo.core.contributions import merged
from deepspeed_bamboo.core.grid import Grid
from deepspeed_bamboo.core.instructions import Instruction, Op
from deepspeed_bamboo.core.schedule import Mode
from deepspeed_bamboo.runtime.at_work import at_work
from deepspeed_bamboo.runtime.changes import Changes
from deepspeed_bamboo.runtime.checkpoint.beginning import Beginning
from deepspeed_bamboo.runtime.comm.epoch_monitor import EpochChangedError, PeerLostError
from deepspeed_bamboo.runtime.comm.peers import Links
from deepspeed_bamboo.runtime.for_scripts import ScriptEngine
from deepspeed_bamboo.runtime.iteration.activity import ActivityState
from deepspeed_bamboo.runtime.iteration.batch_of_job import BatchOfJob
from deepspeed_bamboo.runtime.iteration.evaluation import EvaluationRequest, data_as_others, evaluate
from deepspeed_bamboo.runtime.iteration.evaluation_position import EvaluationPositions
from deepspeed_bamboo.runtime.iteration.executor import FAULT_POINTS, Executor
from deepspeed_bamboo.runtime.iteration.iteration_end import Contributors, IterationEnd
from deepspeed_bamboo.runtime.iteration.losses import aggregate_losses, agreed_losses, stage_losses
from deepspeed_bamboo.runtime.iteration.micro_batches import PipelineData
from deepspeed_bamboo.runtime.iteration.monitoring import follow_reporter, note_step
from deepspeed_bamboo.runtime.iteration.programs import Programs
from deepspeed_bamboo.runtime.iteration.redundant_forwards import RedundantForwards
from deepspeed_bamboo.runtime.iteration.step_event import log_step
from deepspeed_bamboo.runtime.iteration.worker import Numbers, Worker
from deepspeed_bamboo.runtime.job import garbage
from deepspeed_bamboo.runtime.job.mismatched_calls import whereabouts_of
from deepspeed_bamboo.runtime.job.news import tell
from deepspeed_bamboo.runtime.job.session import WorkerSession
from deepspeed_bamboo.runtime.job.view import CurrentView
from deepspeed_bamboo.runtime.kept_states import KeptStates
from deepspeed_bamboo.runtime.membership.common_state import Known
from deepspeed_bamboo.runtime.membership.own_facts import own_facts, settings_of
from deepspeed_bamboo.runtime.membership.starting import Built, agreed_seed, enter_first_epoch
from deepspeed_bamboo.runtime.owner_changes import OwnerChanges
from deepspeed_bamboo.runtime.recovery.shadow_check import check_shadows_if_due
from deepspeed_bamboo.runtime.recovery.state_transfer import StateTransfer
from deepspeed_bamboo.runtime.step_news import StepNews
from deepspeed_bamboo.runtime.stock.built_state import take_over_stock_state
from deepspeed_bamboo.runtime.stock.hosted_view import in_thread_of_script, show_all_hosted
from deepspeed_bamboo.runtime.stock.hosting import StageHost
from deepspeed_bamboo.runtime.stock.logical import Exchange
from deepspeed_bamboo.runtime.stock.optimizers import problem_with
from deepspeed_bamboo.runtime.stock.recounting import counts_twice
from deepspeed_bamboo.runtime.stock.replica import StageReplica
from deepspeed_bamboo.runtime.stock.running_calls import RunningCalls
from deepspeed_bamboo.runtime.stock.script_groups import ScriptGroups
from deepspeed_bamboo.runtime.stock.script_writes import ScriptWrites
from deepspeed_bamboo.runtime.stock.stock_steps import StockSteps
from deepspeed_bamboo.runtime.survival import Hooks, Survival

_OPERATION_TIMEOUT_SECONDS = 1800.0  # one transfer may wait for a peer that computes


class BambooPipelineEngine(ScriptEngine):
    """Hosts one or more stages and shadows; see the module.

    Made by :func:`deepspeed_bamboo.initialize`, which passes ``session`` and the groups that the script made; all other
    arguments are stock's.
    """

    # Stock's constructor sets these; it has no types.
    grid: Any
    fwd_outputs: list[Any]
    # True on a worker that joined late and whose script has not come to the job's step yet.
    catching_up = False
    _compute_loss: bool
    eval_return_logits: bool

    def __init__(self, *args: Any, session: WorkerSession, script_groups: ScriptGroups, **kwargs: Any) -> None:
        # Until the grid is known, every iterator is that of the pipeline in which this worker starts.
        self.data = PipelineData(home=0)
        self.evaluated = EvaluationPositions()
        self.beginning = Beginning()
        self.session = session
        session.past.count_by(self.beginning.call_of)
        self.script_groups = script_groups
        self.running = RunningCalls()
        self._stage_host: StageHost | None = None
        self.trains_only_trainable = kwargs.get("model_parameters") is not None
        super().__init__(*args, **kwargs)
        grid = Grid(self.grid.data_parallel_size, self.grid.pipe_parallel_size)
        session.faults.check(grid, micro_batches=self.micro_batches)
        self.job_grid = grid
        self.home = self.grid.data_parallel_id
        self.activity = ActivityState()
        self.view = CurrentView(session.interruption)
        self.links = Links(
            session.worker,
            interruption=session.interruption,
            timeout_seconds=_OPERATION_TIMEOUT_SECONDS,
            device=self.device,
            secret=session.identity.secret,
            own_store=session.store,
        )
        self._stage_host = StageHost(self, grid=grid, exchange=self.exchange, gate=self.running.pass_gate)
        self.evaluated_micro_batches = self.micro_batches
        self.last_losses: list[Any] = []
        self.mean_loss = 0.0
        self.worker = self._as_worker()
        size, change = self._batch_size, self._change_batch
        self.batch_of_job = BatchOfJob(size=size, change=change, settings=settings_of(self._config))
        self.feed = self._make_feed()
        take_over_stock_state(self, grid)
        show_all_hosted(self.module, self._shown_to_script)
        self._make_parts_of_an_iteration()
        self._make_parts_of_changes()
        self.redoing.forget()
        follow_reporter(self, script_asks=lambda: in_thread_of_script() or not self._working)
        self._whereabouts = whereabouts_of(session, where=self.script_server.where)
        self._begin(grid)
        self._whereabouts.start()

    def _make_parts_of_an_iteration(self) -> None:
        self.script_writes = ScriptWrites(self.host, self.optimizer, tell=lambda text: tell(self.worker, text))
        self.transfer = StateTransfer(
            self.worker, written=self.script_writes.note, process_rank=lambda: int(self.global_rank)
        )
        self.owner_changes = OwnerChanges(self.worker, transfer=self.transfer, past=lambda: self.redoing)
        self.forward_seed = agreed_seed(self.session.config.seed, device=self.device)
        self.stock_steps = StockSteps(self)
        self.iteration_end = IterationEnd(
            self.worker,
            stock=self.stock_steps,
            running=self.running,
            writes=self.script_writes,
            contributors=Contributors(
                prepare=self.complete_data,
                first=lambda: self.news.contribution(),
                last=lambda: merged(self.shadow_rebuild.contribution(), self.failover.contribution()),
                counts=lambda agreed: self.redundancy_repair.count_on_rebuilt(agreed),
                rebuilt=lambda: self.shadow_rebuild,
            ),
        )
        redundant = RedundantForwards(self.session.config.redundancy, device=self.device)
        self.host_offload = redundant.host_offload
        self.executor = Executor(
            self,
            host=self.host,
            links=self.links,
            me=self.session.worker,
            seed=lambda: self.forward_seed,
            before=self._before_instruction,
            after=lambda _, replica: self.failover.after(replica),
            redundant=redundant,
            pulse=self.session.pulse,
        )

    def _make_parts_of_changes(self) -> None:
        self.stage_files = self._make_stage_files()
        kept = KeptStates(
            self.worker,
            files=self.stage_files,
            feed=self.feed,
            batch=self.batch_of_job,
            writes=self.script_writes,
            owner_changes=self.owner_changes,
            train=self._train_again,
        )
        self.checkpoints, self.last_state, self.stored = kept.checkpoints, kept.last_state, kept.stored
        self.memory, self.redoing, self.history = kept.memory, kept.redoing, kept.redoing.history
        self._survive_losses()
        known: dict[str, Known] = {
            "owner_changes": self.owner_changes,
            "beginning": self.beginning,
            "past": self.session.past,
            "batch": self.batch_of_job,
            "data_streams": self.data_streams,
        }
        if self.checkpoints is not None:
            known["checkpoints"] = self.checkpoints.rounds
        if self.session.config.goes_back:
            known["memory"] = self.redoing
        changes = Changes(
            self.worker,
            times=self.executor.times,
            beside=self._take_seconds_beside,
            transfer=self.transfer,
            modes=self.modes,
            world=self.world,
            numbers=self.__dict__,
            known=known,
        )
        self.common, self.reconfiguration = changes.common, changes.reconfiguration
        self.news = StepNews(
            self.worker,
            losses=lambda: stage_losses(self),
            again=lambda: self.failover.redoing,
            redoing=self.redoing,
            data_streams=self.data_streams,
            batch_function=self.feed.function,
            modes=self.modes,
            owner_changes=self.owner_changes,
            checkpoints=self.checkpoints,
            reconfiguration=self.reconfiguration,
        )

    def _as_worker(self) -> Worker:
        """What the parts get in place of this engine. Reading its numbers starts nothing."""
        numbers = Numbers(
            step=lambda: int(self.__dict__["global_steps"]),
            micro_batches=lambda: int(self.micro_batches),
            confined=lambda: self.feed.confined,
            attempt=lambda coordinate, step: self.failover.attempt(coordinate, step=step),
        )
        return Worker(
            session=self.session,
            links=self.links,
            host=self.host,
            activity=self.activity,
            view=self.view,
            grid=self.job_grid,
            device=self.device,
            numbers=numbers,
            perform=self.perform,
        )

    def _survive_losses(self) -> None:
        hooks = Hooks(
            recover=self._recover,
            alone=lambda: self.calls_alone(),
            abandon=self.iteration_end.abandon,
            evaluated=lambda: self.evaluated_micro_batches,
            on_rank=self._take_rank,
            way_back=self.redoing.way_back(count_to=self.stock_steps.count_to),
        )
        survival = Survival(
            self.worker, transfer=self.transfer, memory=self.memory, groups=self.script_groups, hooks=hooks
        )
        self.modes, self.shadow_rebuild, self.world = survival.modes, survival.shadow_rebuild, survival.world
        self.script_server, self.failover = survival.script_server, survival.failover
        self.redundancy_repair = survival.redundancy_repair
        self.programs = Programs(
            self.worker,
            modes=self.modes,
            rebuilds=self.shadow_rebuild.takes_part,
            evaluated_micro_batches=lambda: self.evaluated_micro_batches,
        )

    def _take_rank(self, rank: int) -> None:
        self.global_rank = rank

    @at_work
    def _recover(self, cause: EpochChangedError | PeerLostError) -> None:
        self.failover.run(cause)

    def _begin(self, grid: Grid) -> None:
        # As ZeRO does, DeepSpeed's bf16 optimizer spreads its fp32 weights and moments over the pipelines.
        built = Built(
            alike=not self.zero_optimization() and not self.using_bf16_optimizer,
            facts=lambda: own_facts(self),
            problem=lambda: problem_with(self.optimizer_source),
            recounts=lambda: any(counts_twice(replica.module) for replica in self.host.owners()),
            streams=self.data_streams,
        )
        enter_first_epoch(self.worker, transfer=self.transfer, built=built, enter_world=self.world.enter)
        with self.working():
            self.owner_changes.note()
        garbage.set_aside_what_exists(self.device)

    @property
    def host(self) -> StageHost:
        """The stages that this worker holds. Raises RuntimeError while stock is still building the engine."""
        if self._stage_host is None:
            raise RuntimeError("the engine is not ready")
        return self._stage_host

    # ---- hooks of the stock engine --------------------------------------------------------------------

    def is_gradient_accumulation_boundary(self) -> bool:
        """Those of several stages interleave, and some are given up, so the one flag of stock can't tell."""
        return self.running.any

    def _report_progress(self, step: int) -> None:
        if self._stage_host is None or self.is_shown(self.host.active):
            super()._report_progress(step)

    def is_shown(self, replica: StageReplica | None) -> bool:
        """True for the one replica of this worker that represents it on the console and in monitors."""
        owners = self.host.owners()
        return bool(owners) and replica is owners[0]

    def stock_forward(self, buffer_id: int) -> None:
        """Stock's forward of the active stage."""
        super()._exec_forward_pass(buffer_id)

    def stock_backward(self, buffer_id: int) -> None:
        """Stock's backward of the active stage."""
        super()._exec_backward_pass(buffer_id)

    def _exec_schedule(self, pipe_schedule: Any) -> None:
        if not torch.is_grad_enabled():
            raise RuntimeError("evaluation goes through eval_batch")
        self._train_iteration()

    @at_work
    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Any:
        """As stock's, and surviving losses: returns the mean loss of the batch on every worker."""
        started = time.perf_counter()
        if data_iter is not None:
            self.set_dataiterator(data_iter)
        self.feed.warn_if_confined()
        self.reconfiguration.run_if_wished(before_moves=self.owner_changes.follow)
        self.feed.agree()
        self.data_streams.settle(self.worker, position=self.feed.used(since=0))  # without training_data, too
        self.owner_changes.follow()
        for replica in self.host.replicas():
            with self.host.hosting(replica):
                self.module.train()  # every layer, as stock does of the stage that is shown
                self.total_loss = None
                self.total_additional_losses = None
        self.host.activate_shown()
        loss = super().train_batch()
        self.redoing.keep(loss=self.mean_loss)
        mode, slow = self.modes.mode.value, self.reconfiguration.balancing.slow_workers
        log_step(self, seconds=time.perf_counter() - started, mode=mode, slow=slow)
        note_step(self)
        if self.checkpoints is not None:
            self.checkpoints.take_if_due()
        self.failover.before_script()
        return loss

    @at_work
    def eval_batch(
        self,
        data_iter: Iterator[Any] | None,
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """As stock's, and surviving losses: an evaluation that a loss interrupts is done again from its start."""
        micro_batches = self.micro_batches if num_micro_batches is None else num_micro_batches
        request = EvaluationRequest(micro_batches, return_logits, compute_loss, reduce_output, bcast_loss)
        evaluation = data_as_others(self, data_iter)
        self.owner_changes.follow_evaluation()
        try:
            with self.feed.reading(evaluation):
                result = evaluate(self, request)
        finally:
            self.evaluated.advance(data_iter, micro_batches)
        self.failover.before_script()
        return result

    def _aggregate_total_loss(self) -> torch.Tensor:
        return aggregate_losses(self)

    # ---- activities -----------------------------------------------------------------------------------

    @at_work
    def perform(self, kind: str, body: Callable[[], None]) -> None:
        """Run ``body`` as the next activity, again after every recovery, until it gets through."""
        self.activity.kind, self.activity.step = kind, self.worker.step
        self.script_writes.follow(modules=True)
        while True:
            try:
                self.session.interruption.check()
                self.executor.attempt(kind, body)
                break
            except (EpochChangedError, PeerLostError) as cause:
                self.failover.run(cause)
                if self.activity.redone:
                    break
        self.activity.finish()
        if not self.failover.redoing:
            self.script_server.tidy()

    def _train_iteration(self) -> None:
        for replica in self.host.replicas():
            replica.start_iteration()
            self.host.empty_buffers(replica)
            self.host.activate(replica)
            self._reserve_pipe_buffers(self.micro_batches)
            self.fwd_outputs = []
        self.host.activate_shown()  # whose counters are right: a shadow's step may be yet to come
        step = self.worker.step
        self.perform("train", self._train_body)
        if not self.host.replicas():
            self.stock_steps.count_to(step + 1)
        self.last_losses = agreed_losses(self)
        self.news.take_in()
        self.iteration_end.forget()
        self.host_offload.start_iteration()
        self.failover.log_if_any()
        self.data.forget(step)
        self.host.activate_shown()
        self.redundancy_repair.repair()
        self.owner_changes.note()
        check_shadows_if_due(self.worker)

    def _train_again(self) -> float:
        aside = self._compute_loss, self.eval_return_logits
        self._compute_loss, self.eval_return_logits = True, False
        self._train_iteration()
        aggregate_losses(self)
        self._compute_loss, self.eval_return_logits = aside
        return self.mean_loss

    def _train_body(self) -> None:
        if not self.activity.rounds:
            self.shadow_rebuild.begin()
            beforehand = self.modes.planned is not Mode.LAZY
            self.feed.supply.deliver(micro_batches=self.micro_batches, beforehand=beforehand)
            context = self.programs.context(training=True, micro_batches=self.micro_batches)
            for replica in self.host.owners():
                self.worker.strike_if_scripted(replica.coordinate, "idle")
            program = self.programs.own(training=True)
            self.executor.expect(program, context)
            for instruction in program:
                if instruction.coordinate is not None:
                    self.executor.execute(instruction, context)
                    continue
                self.session.pulse.at(instruction)
                if instruction.op is not Op.STEP:
                    self.executor.leave_passes()
                    self.iteration_end.execute(instruction, context)
        self.iteration_end.step(self.programs.context(training=True, micro_batches=self.micro_batches))
        self.failover.copy_lost()

    # ---- collectives and faults -----------------------------------------------------------------------

    def exchange(self) -> Exchange:
        call = self.running.current
        if self.host.building:
            # A replica under construction gets its values from the owner afterwards.
            return lambda group, operation, tensor: tensor
        if call is None and not self._working:
            return self.script_server.exchange
        if call is None:
            raise RuntimeError("a collective of stock DeepSpeed outside of an iteration's end is not supported")
        return call.exchange  # type: ignore[return-value]

    def _before_instruction(self, instruction: Instruction, replica: StageReplica) -> None:
        if (at := FAULT_POINTS.get(instruction.op)) is not None:
            self.worker.strike_if_scripted(replica.coordinate, at, instruction.micro_batch)
        self.failover.before(instruction)
