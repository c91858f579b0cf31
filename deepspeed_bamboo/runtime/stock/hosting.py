"""The stages that one worker holds, and which of them DeepSpeed's engine is working on."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.utils import groups as deepspeed_groups

from deepspeed_bamboo.core.grid import Coordinate, Grid
from deepspeed_bamboo.core.replica_differences import differences
from deepspeed_bamboo.runtime.stock import zero_one  # noqa: F401 (registers the optimizer)
from deepspeed_bamboo.runtime.stock.attributes import COUNTERS, MADE_LATER, STAGE_ATTRIBUTES
from deepspeed_bamboo.runtime.stock.blank import BlankParameters
from deepspeed_bamboo.runtime.stock.building import built_apart
from deepspeed_bamboo.runtime.stock.class_values import ClassValues, counting_from
from deepspeed_bamboo.runtime.stock.description import Description, describe
from deepspeed_bamboo.runtime.stock.given_parameters import BuiltLayers, refuse_strangers
from deepspeed_bamboo.runtime.stock.gradients import clear_gradients, parameters, require_state, require_supported
from deepspeed_bamboo.runtime.stock.hyperparameters import values_of
from deepspeed_bamboo.runtime.stock.kept_by_functions import kept_from_before
from deepspeed_bamboo.runtime.stock.likeness import lay_out, liken
from deepspeed_bamboo.runtime.stock.logical import Exchange, LogicalGrid, LogicalGroup
from deepspeed_bamboo.runtime.stock.optimizers import maker_for
from deepspeed_bamboo.runtime.stock.patches.compiled_adam import make_independent_of_history
from deepspeed_bamboo.runtime.stock.patches.grouped_updates import GradientUpdates
from deepspeed_bamboo.runtime.stock.patches.norm_on_host import judge_norm_on_host
from deepspeed_bamboo.runtime.stock.replica import (
    StageReplica,
    count_in_global_norm,
    logical_groups,
    stage_module,
    tied_groups,
)
from deepspeed_bamboo.runtime.stock.separate import ids_of
from deepspeed_bamboo.runtime.stock.symbols import require_stage_attributes

if TYPE_CHECKING:
    from deepspeed_bamboo.runtime.engine import BambooPipelineEngine

# Of the engine, by stage: what depends on when the script made its optimizer.
_FLAGS = ("using_bf16_optimizer", "_support_torch_style_backward")


class StageHost:
    """Holds the replicas of one worker and switches the engine between them.

    Args:
        engine: the engine whose attributes are switched.
        grid: the job's grid.
        exchange: serves collectives of stock code, see :class:`LogicalGroup`.
        gate: called before any optimizer changes a weight.
    """

    def __init__(
        self,
        engine: BambooPipelineEngine,
        *,
        grid: Grid,
        exchange: Callable[[], Exchange],
        gate: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._grid = grid
        self._exchange = exchange
        self._gate = gate
        self._active: StageReplica | None = None
        self._primary: StageReplica | None = None
        self.building = False
        self.beginning: ClassValues | None = None  # from which constructors of a stage's layers count
        self.gradient_updates = GradientUpdates()
        self.owned: dict[Coordinate, StageReplica] = {}
        self.shadows: dict[Coordinate, StageReplica] = {}
        # Built already and not in use: what a worker that joins made at its start.
        self._spare: dict[Coordinate, StageReplica] = {}

    @property
    def active(self) -> StageReplica | None:
        """The replica that the engine's attributes belong to."""
        return self._active

    def replicas(self) -> list[StageReplica]:
        """All replicas, owned ones first, each kind in grid order."""
        return [kind[c] for kind in (self.owned, self.shadows) for c in self._grid if c in kind]

    def built(self) -> list[StageReplica]:
        """All replicas there are, those of no use yet included."""
        return [*self.owned.values(), *self.shadows.values(), *self._spare.values()]

    def set_scheduler(self, replica: StageReplica, scheduler: Any) -> None:
        """``scheduler`` is stepped with ``replica`` from now on."""
        replica.attributes["lr_scheduler"] = scheduler
        if replica is self._active:
            self._engine.lr_scheduler = scheduler

    def shown(self) -> StageReplica | None:
        """What the engine shows between iterations: the stage for which the optimizer stands that the script holds,
        while this worker owns it; else the first one that it owns, or else shadows."""
        if self._primary is not None and self.owned.get(self._primary.coordinate) is self._primary:
            return self._primary
        return next(iter(self.replicas()), None)

    def keep_showing(self, replica: StageReplica) -> None:
        """The optimizer that the script holds stands for ``replica``, which this worker owns."""
        self._primary = replica

    def activate_shown(self) -> None:
        """See :meth:`shown`; nothing on a worker that stands by."""
        shown = self.shown()
        if shown is not None:
            self.activate(shown)

    def owners(self) -> list[StageReplica]:
        """Replicas of the coordinates that this worker hosts, in grid order."""
        return [self.owned[c] for c in self._grid if c in self.owned]

    def hosted(self, name: str) -> dict[Coordinate, Any]:
        """Attribute ``name`` of all stages here, by coordinate (pipeline, stage), in grid order; between iterations.

        After a loss a worker hosts several stages; one that stands by hosts none.
        """
        for replica in self.owners():
            replica.finish_step()
        self.save()
        return {replica.coordinate: replica.attributes[name] for replica in self.owners()}

    @contextmanager
    def hosting(self, replica: StageReplica) -> Iterator[None]:
        """The engine works on ``replica`` inside the block (and until it is switched again)."""
        self.activate(replica)
        yield

    def activate(self, replica: StageReplica) -> None:
        """Put the engine's stage attributes aside and bring those of ``replica``."""
        if self._active is replica:
            return
        self.save()
        self._engine.__dict__.update(replica.attributes)
        self._engine._set_client_model(replica.attributes["module"])
        deepspeed_groups.mpu = replica.attributes["grid"]
        self._active = replica

    def show_again(self, replica: StageReplica) -> None:
        """Make the engine read the attributes of ``replica``, which have changed, if it is the active one."""
        if self._active is replica:
            self._engine.__dict__.update(replica.attributes)

    def save(self) -> None:
        """Bring the active replica's ``attributes`` up to date."""
        if self._active is not None:
            state = self._engine.__dict__
            self._active.attributes.update({name: state[name] for name in STAGE_ATTRIBUTES})

    def adopt_primary(self, coordinate: Coordinate, logical: LogicalGrid) -> StageReplica:
        """Take over the stage that stock DeepSpeed has just built in the engine."""
        state = self._engine.__dict__
        for name in MADE_LATER:
            state.setdefault(name, None)
        require_stage_attributes(state)
        replica = StageReplica(coordinate, {}, logical_groups(state["module"], logical))
        self._active = replica
        self.save()
        # A worker that never builds another replica never switches, which would do this.
        deepspeed_groups.mpu = logical
        self.owned[coordinate] = self._primary = replica
        given = self._engine.client_lr_scheduler
        if given is None or callable(given):
            replica.built_scheduler = replica.attributes["lr_scheduler"]
        self._prepare(replica)
        return replica

    def adopt_optimizer(self) -> None:
        """The script has made the optimizer of the active stage after ``initialize``."""
        self.save()
        if self._active is not None:
            self._prepare(self._active)

    def logical_grid(self, coordinate: Coordinate, *, topology: Any, process_rank: int) -> LogicalGrid:
        """The grid object through which stock code sees ``coordinate``."""
        return LogicalGrid(
            topology=topology,
            grid=self._grid,
            coordinate=coordinate,
            exchange=self._exchange,
            process_rank=process_rank,
            stages_here=lambda: self._engine.stages_to_script(coordinate.pipeline),
            group_to_script=lambda kind: self._engine.group_to_script(kind),
        )

    def own(self, coordinate: Coordinate, *, process_rank: int, layers: BuiltLayers) -> None:
        """Own one more coordinate, of which ``layers`` are there already."""
        replica = self.build(coordinate, process_rank=process_rank, layers=layers)
        replica.complete = True
        self.owned[coordinate] = replica

    def description(self, replica: StageReplica) -> Description:
        """What ``replica`` is, see ``description.py``."""
        self.save()
        state = replica.attributes
        flags = {name: state[name] for name in _FLAGS}
        return describe(state["module"], state["optimizer"], made=replica.made, flags=flags)

    def build(
        self,
        coordinate: Coordinate,
        *,
        process_rank: int,
        description: Description | None = None,
        layers: BuiltLayers | None = None,
    ) -> StageReplica:
        """Make a replica of ``coordinate`` with stock DeepSpeed's own means; its weights are not yet the owner's.

        The random number generators are where they were, and no other worker takes part. ``description``: what its
        owner is; what can't be made alike shows when the result is described. ``layers``: see :meth:`own`.
        """
        engine = self._engine
        if coordinate in self._spare and self._is_alike(self._spare[coordinate], description):
            spare = self._spare.pop(coordinate)
            spare.complete = False
            spare.name_ranks(process_rank)  # the default group may be another one since it was set aside
            return spare
        template = next(iter(self.owned.values())) if self.owned else self._active
        if template is None:
            raise RuntimeError("a worker without any stage has nothing to build another one from")
        self.save()
        previous = self._active
        module = template.attributes["module"]
        with built_apart(engine.device), counting_from(self.beginning):
            logical = self.logical_grid(coordinate, topology=module._topo, process_rank=process_rank)
            new_module = self._module(coordinate, logical=logical, like=module, description=description, layers=layers)
            for group in logical_groups(new_module, logical):
                group.name_ranks(process_rank)
            replica = StageReplica(
                coordinate, self._blank_attributes(coordinate, logical), logical_groups(new_module, logical)
            )
            self._active = replica
            engine.__dict__.update(replica.attributes)
            self.building = True
            try:
                self._configure(new_module, logical, description, layers)
            finally:
                self.building = False
            self.save()
            replica.built_scheduler = replica.attributes["lr_scheduler"]
        if previous is not None:
            self.activate(previous)
        self._prepare(replica)
        replica.complete = False
        for other in self.built():
            other.moving_attributes.share(other.module, replica.module)
            replica.moving_attributes.share(replica.module, other.module)
        return replica

    def _module(
        self,
        coordinate: Coordinate,
        *,
        logical: LogicalGrid,
        like: Any,
        description: Description | None,
        layers: BuiltLayers | None,
    ) -> Any:
        """The layers of ``coordinate``, of the PipelineModule ``like`` whose stage is another one."""
        engine = self._engine
        with BlankParameters() if layers is None else nullcontext():
            module = stage_module(
                like,
                coordinate=coordinate,
                grid=self._grid,
                logical_grid=logical,
                device=engine.device,
                fill=None if layers is None else layers.fill,
                taken=ids_of(replica.module for replica in self.built()),
            )
            if description is not None:
                examples = [replica.module for replica in self.built()]
                liken(module, description, examples=examples, device=engine.device)
        module.tied_comms = tied_groups(module, coordinate=coordinate, grid=self._grid, exchange=self._exchange)
        if engine.session.config.gradient_norm == "global":
            count_in_global_norm(module)
        return module

    def _is_alike(self, replica: StageReplica, description: Description | None) -> bool:
        return description is None or not differences(description, self.description(replica))

    def drop_incomplete(self) -> None:
        """Forget shadows whose state was still to come: nobody may take them for a stage."""
        for coordinate in [c for c, replica in self.shadows.items() if not replica.complete]:
            del self.shadows[coordinate]

    def set_aside(self) -> None:
        """This worker owns nothing yet; what it has built waits to be of use."""
        self._spare, self.owned = {**self._spare, **self.owned}, {}

    def take_roles(self, *, owned: Iterable[Coordinate], shadows: Iterable[Coordinate]) -> None:
        """Own and shadow these from now on, with the replicas there are; all others are dropped.

        A coordinate without a replica here is left out: its state has to be copied (see ``copied_from``).
        """
        for replica in self.shadows.values():
            replica.finish_step()
        held = {**self.shadows, **self.owned}
        self.owned = {c: held[c] for c in owned if c in held}
        self.shadows = {c: held[c] for c in shadows if c in held and c not in self.owned}
        if self.owned or self.shadows:
            self._spare.clear()
        if all(replica is not self._primary for replica in self.built()):
            self._primary = None  # its memory is of use elsewhere

    def empty_buffers(self, replica: StageReplica) -> None:
        """Drop inputs, labels, outputs and graphs; stored redundant forwards with them."""
        buffers = self._engine.pipe_buffers if replica is self._active else replica.attributes["pipe_buffers"]
        for slots in buffers.values():
            slots[:] = [None] * len(slots)

    def drop_micro_batch(self, replica: StageReplica, micro_batch: int) -> None:
        """After its backward: drop what it was computed from."""
        buffers = self._engine.pipe_buffers if replica is self._active else replica.attributes["pipe_buffers"]
        for name in ("inputs", "outputs", "labels"):
            buffers[name][micro_batch] = None

    def forget_gradients(self, replica: StageReplica) -> None:
        """Drop accumulated gradients, but keep stored forwards."""
        replica.finish_step()
        with self.hosting(replica):
            clear_gradients(self._engine.optimizer, self._engine.module)

    def restart(self, replica: StageReplica, *, micro_batches: int, training: bool = True) -> None:
        """Set a replica back to the start of an activity: no losses, no progress, and (training) no gradients."""
        replica.finish_step()  # which reads them
        replica.start_iteration()
        with self.hosting(replica):
            if training:
                clear_gradients(self._engine.optimizer, self._engine.module)
            self._engine.module.train(training)
            self._engine._reserve_pipe_buffers(micro_batches)
            self._engine.total_loss = None
            self._engine.total_additional_losses = None
            self._engine.fwd_outputs = []
            self.empty_buffers(replica)

    def name_ranks(self, process_rank: int) -> None:
        """Tell torch the group ranks again, after the default process group was replaced."""
        for replica in self.replicas():
            replica.name_ranks(process_rank)

    def _configure(
        self, module: Any, logical: LogicalGrid, description: Description | None, layers: BuiltLayers | None
    ) -> None:
        engine = self._engine
        engine.mpu = logical
        engine._configure_distributed_model(module)
        if description is not None:
            lay_out(module, description)
        engine.module_forward_pre_hook = engine._create_module_forward_pre_hook()
        engine.module_forward_post_hook = engine._create_module_forward_post_hook()
        engine.param_names = {parameter: name for name, parameter in module.named_parameters()}
        engine.__dict__.update({} if description is None else description["flags"])
        if description is not None and description["optimizer"] is None:
            return  # the script makes one later
        maker = maker_for(
            engine.optimizer_source,
            configured=engine._configure_basic_optimizer,
            described=None if description is None else description["optimizer"],
            module=module,
        )
        trainable = parameters(module) if engine.trains_only_trainable else list(module.parameters())
        if layers is not None and layers.given is not None:
            trainable = layers.given.within(module)
        with kept_from_before(engine.optimizer_source, engine.client_lr_scheduler):
            engine._configure_optimizer(maker, trainable)
            if engine.client_lr_scheduler is None or callable(engine.client_lr_scheduler):
                engine._configure_lr_scheduler()
        if description is None:
            engine.using_bf16_optimizer = isinstance(engine.optimizer, BF16_Optimizer)
        # Scripts set the flag by hand, too, where stock fails without; only ZeRO's optimizers take the hook.
        if engine._support_torch_style_backward and isinstance(engine.optimizer, ZeROOptimizer):
            engine.optimizer.register_grad_acc_post_hook(engine._backward_post_hook)
        if module.activation_checkpoint_interval > 0:
            module._precompute_checkpointable_values()

    def _blank_attributes(self, coordinate: Coordinate, logical: LogicalGrid) -> dict[str, Any]:
        engine = self._engine
        blank: dict[str, Any] = dict.fromkeys(STAGE_ATTRIBUTES)
        blank.update(
            {name: engine.__dict__[name] for name in ("data_parallel_group", "seq_data_parallel_group")},
            grid=logical,
            mpu=logical,
            stage_id=coordinate.stage,
            prev_stage=coordinate.stage - 1,
            next_stage=coordinate.stage + 1,
            module=engine.module,
            pipe_buffers={name: [] for name in engine.pipe_buffers},
            num_pipe_buffers=0,
            loss=torch.tensor(0.0, device=engine.device),
            _support_torch_style_backward=engine._support_torch_style_backward,
            **{name: engine.__dict__[name] for name in COUNTERS},
            skipped_steps=0,
            checkpoint_mp_rank=coordinate.stage if self._grid.stages > 1 else 0,
            save_non_zero_checkpoint=engine.checkpoint_engine.is_data_parallel_writer(coordinate.pipeline),
            save_zero_checkpoint=engine.__dict__["save_zero_checkpoint"],
            _step_applied=False,
            fwd_outputs=[],
        )
        return blank

    def _prepare(self, replica: StageReplica) -> None:
        if replica.attributes["optimizer"] is None:
            return  # a script that makes one later
        require_supported(replica.attributes["optimizer"])
        refuse_strangers(replica.attributes["optimizer"], replica.module)
        require_state(replica.attributes["lr_scheduler"])
        optimizer, values = self._engine.before_scheduler
        basic = replica.attributes["basic_optimizer"]
        replica.made = values if optimizer is basic else values_of(basic)
        self.gradient_updates.group(replica.attributes["optimizer"])
        judge_norm_on_host(replica)
        if isinstance(basic, torch.optim.Optimizer):
            make_independent_of_history(basic)
            basic.register_step_pre_hook(lambda *_: self._gate())


def replace_groups(value: Any, replacements: dict[Any, LogicalGroup]) -> Any:
    """``value`` with each process group that has a logical twin replaced by it, inside lists too."""
    if isinstance(value, list):
        return [replace_groups(item, replacements) for item in value]
    return replacements.get(value, value) if isinstance(value, torch.distributed.ProcessGroup) else value


def use_logical_groups(holder: Any, replacements: dict[Any, LogicalGroup]) -> None:
    """Replace the process groups that ``holder`` keeps in its attributes (an optimizer of DeepSpeed, the engine)."""
    if holder is None:
        return
    for name, value in list(vars(holder).items()):
        replaced = replace_groups(value, replacements)
        if replaced is not value and (isinstance(value, list) or replaced in replacements.values()):
            holder.__dict__[name] = replaced


def stock_twins(stock: Any, logical: LogicalGrid) -> OrderedDict[Any, LogicalGroup]:
    """The process groups that stock's grid object made, each with its logical twin."""
    twins: OrderedDict[Any, LogicalGroup] = OrderedDict()
    for name in ("ds_model_proc_group", "dp_proc_group", "pp_proc_group", "slice_proc_group"):
        twins.setdefault(getattr(stock, name), getattr(logical, name))
    return twins
