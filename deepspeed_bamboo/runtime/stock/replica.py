"""One stage as this worker holds it: its module, optimizer, scheduler, counters and buffers.

DeepSpeed's engine keeps all of that in attributes of one object, for one stage. A worker of this plugin
holds several stages (the coordinates it hosts, the shadows it keeps), so those attributes are put aside in
a :class:`StageReplica` and brought back while stock code works on that stage, as DualPipeV does with its
two phases.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from deepspeed.runtime.pipe.module import PipelineModule, TiedLayerSpec

from deepspeed_bamboo.core.grid import Coordinate, Grid
from deepspeed_bamboo.core.progress import CoordinateProgress
from deepspeed_bamboo.runtime.stock.buffers import BufferName
from deepspeed_bamboo.runtime.stock.held_attributes import AttributeState, MovingAttributes
from deepspeed_bamboo.runtime.stock.hook_values import HookState, MovingHooks
from deepspeed_bamboo.runtime.stock.hyperparameters import Values
from deepspeed_bamboo.runtime.stock.likeness import take_root_hooks
from deepspeed_bamboo.runtime.stock.logical import Exchange, GroupKey, LogicalGrid, LogicalGroup
from deepspeed_bamboo.runtime.stock.plain_values import MovingValues, PlainValues
from deepspeed_bamboo.runtime.stock.rebinding import own_beside_layers, rebound
from deepspeed_bamboo.runtime.stock.separate import ids_of, separate

Tensors = torch.Tensor | tuple[torch.Tensor, ...]


@dataclass
class StageReplica:
    """The state of one coordinate on this worker, as owner or as shadow.

    ``attributes`` are the engine's, see :mod:`attributes`; they are current only while the replica is not
    active in the engine. ``retained_outputs`` and ``retained_gradients`` are the boundary tensors of the
    running iteration by micro-batch, kept to its end so that they can be sent again (architecture 5). ``without_graph``
    are the micro-batches whose forward has to be repeated before its backward, see ``runtime.recompute``.
    """

    coordinate: Coordinate
    attributes: dict[str, Any]
    groups: list[LogicalGroup]
    micro_offset: int = 0
    # False from its building until its owner's state has arrived.
    complete: bool = True
    progress: CoordinateProgress = field(default_factory=CoordinateProgress)
    retained_outputs: dict[int, Tensors] = field(default_factory=dict)
    retained_gradients: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    received_gradients: dict[int, Tensors | list[torch.Tensor]] = field(default_factory=dict)
    losses: dict[int, Any] = field(default_factory=dict)
    without_graph: dict[int, Any] = field(default_factory=dict)
    buffers_before: dict[int, Any] = field(default_factory=dict)  # the module's, before a micro-batch's forward
    mirrored: bool = False
    pending_buffers: dict[BufferName, torch.Tensor] | None = None
    pending_values: PlainValues = field(default_factory=dict)
    moving: MovingValues = field(default_factory=MovingValues)
    pending_hooks: HookState | None = None
    moving_hooks: MovingHooks = field(default_factory=MovingHooks)
    pending_attributes: AttributeState | None = None
    moving_attributes: MovingAttributes = field(default_factory=MovingAttributes)
    before_reduction: Callable[[], None] | None = None
    made: Values = ()  # what the optimizer's groups held when it was made
    built_scheduler: Any = None  # made for this stage; another one in ``attributes`` is the script's object
    script_scheduler: Any = None  # stands for a scheduler where this stage has none of its own
    scheduler_state: Any = None  # the owner's, where this stage has no scheduler to load it into
    held_by_script: bool = False  # the script was given its optimizer and scheduler
    stepping: Any = None  # the CUDA event at the end of a step on another stream, or a LateStep

    @property
    def module(self) -> PipelineModule:
        return self.attributes["module"]

    def moves_beside_weights(self) -> bool:
        """Whether anything beside parameters may differ between pipelines: a buffer, or what forwards change."""
        buffers = next(self.module.buffers(), None) is not None
        return buffers or bool(self.moving.values(self.module)) or self.moving_attributes.moves

    def finish_step(self) -> None:
        """Before the replica's state is read, written or dropped: what this stream gets comes after its last step."""
        stepping, self.stepping = self.stepping, None
        if stepping is not None:
            stepping.wait(torch.cuda.current_stream() if torch.cuda.is_available() else None)

    def name_ranks(self, process_rank: int) -> None:
        """Tell torch the ranks in the replica's groups; needed again whenever the default group was replaced."""
        for group in self.groups:
            group.name_ranks(process_rank)

    def start_iteration(self) -> None:
        """Forget the previous iteration's boundary tensors and progress."""
        self.progress = CoordinateProgress()
        for kept in (self.retained_outputs, self.retained_gradients, self.received_gradients, self.losses):
            kept.clear()
        self.without_graph.clear()
        self.buffers_before.clear()
        self.mirrored = False
        self.pending_buffers = None
        self.pending_values = {}
        self.pending_hooks = self.pending_attributes = None
        self.before_reduction = None


def stage_module(
    template: PipelineModule,
    *,
    coordinate: Coordinate,
    grid: Grid,
    logical_grid: LogicalGrid,
    device: torch.device,
    fill: Callable[[PipelineModule], None] | None = None,
    taken: Iterable[int] = (),
) -> PipelineModule:
    """A PipelineModule like ``template`` that holds the layers of another stage.

    The layers are built again from their specs; callers load weights into them and keep the random number generators
    out of it. What is in ``taken`` (ids of modules and tensors that other stages use), and ready-made modules, are
    copied without values. What the template keeps of itself, such as bound methods, becomes the module's. No process
    group is created. ``fill`` puts layers into the module that are there already.
    """
    module = template.__class__.__new__(template.__class__)
    torch.nn.Module.__init__(module)
    inherited = torch.nn.Module().__dict__.keys()
    kept = {name: value for name, value in template.__dict__.items() if name not in inherited}
    module.__dict__.update({name: rebound(value, old=template, new=module) for name, value in kept.items()})
    module.training = template.training
    start, stop = template.parts[coordinate.stage], template.parts[coordinate.stage + 1]
    module._layer_specs = list(module._layer_specs)
    module._grid = logical_grid
    module.global_rank = grid.rank(coordinate)
    module.stage_id = coordinate.stage
    take_root_hooks(module, template)
    module.forward_funcs = []
    module.fwd_map = {}
    module.tied_modules = torch.nn.ModuleDict()
    module.tied_weight_attrs = {}
    module.is_checkpointable_results = []
    module.is_checkpointable_results_interval = None
    _take_beside_layers(module, template)
    module._set_bounds(start, stop)
    if fill is None:
        module._build()
        ready = ids_of(spec for spec in module._layer_specs[start:stop] if isinstance(spec, torch.nn.Module))
        separate(module, taken=ready.union(taken))
    else:
        fill(module)
    module.to(device)
    module.micro_offset = template.micro_offset
    return module


def _take_beside_layers(module: PipelineModule, template: PipelineModule) -> None:
    """What a subclass or loss_fn has registered besides the layers: each stage has its own, as in processes."""
    for name, child in template._modules.items():
        if name != "tied_modules" and not name.isdigit():
            module._modules[name] = own_beside_layers(child)
    for kind in ("_parameters", "_buffers"):
        for name, value in getattr(template, kind).items():
            copied = copy.deepcopy(value)
            if isinstance(value, torch.Tensor):
                copied.__dict__.update(value.__dict__)
            getattr(module, kind)[name] = copied
    module._non_persistent_buffers_set.update(template._non_persistent_buffers_set)


def tied_groups(
    module: PipelineModule, *, coordinate: Coordinate, grid: Grid, exchange: Callable[[], Exchange]
) -> dict[str, dict[str, Any]]:
    """``tied_comms`` as PipelineModule builds it, with logical groups; marks replicated weights as it does."""
    if grid.stages == 1:
        return {}
    result: dict[str, dict[str, Any]] = {}
    for key in sorted({spec.key for spec in module._layer_specs if isinstance(spec, TiedLayerSpec)}):
        stages = sorted(
            {
                module.stage_owner(index)
                for index, spec in enumerate(module._layer_specs)
                if isinstance(spec, TiedLayerSpec) and spec.key == key
            }
        )
        if coordinate.stage not in stages:
            continue
        members = tuple(Coordinate(coordinate.pipeline, stage) for stage in stages)
        group = LogicalGroup(GroupKey(f"tied:{key}", members), coordinate=coordinate, exchange=exchange)
        result[key] = {
            "ranks": [grid.rank(member) for member in members],
            "group": group,
            "weight_attr": module.tied_weight_attrs[key],
            "module": module.tied_modules[key],
        }
        if coordinate != members[0]:
            for parameter in module.tied_modules[key].parameters():
                parameter.ds_pipe_replicated = True
    return result


def count_in_global_norm(module: PipelineModule) -> None:
    """Make stock's clipping count a stage's parameters whatever the stage, copies of tied ones excepted.

    Stock counts those of stage 0, and those marked as belonging to one model-parallel rank only, as these do.
    """
    for parameter in module.parameters():
        if not getattr(parameter, "ds_pipe_replicated", False):
            parameter.model_parallel = True


def logical_groups(module: PipelineModule, grid: LogicalGrid) -> list[LogicalGroup]:
    """Every logical group that a stage uses."""
    tied = [comm["group"] for comm in module.tied_comms.values()]
    return [grid.ds_model_proc_group, grid.dp_proc_group, grid.pp_proc_group, grid.slice_proc_group, *tied]
