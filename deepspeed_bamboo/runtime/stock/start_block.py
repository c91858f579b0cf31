"""The layers of all stages that a worker hosts at the start, as one PipelineModule until the engine is built.

So what a script does to its module between making it and ``initialize`` (freezing, initial weights by name, hooks)
reaches every stage that its worker hosts. ``initialize`` then takes the stages apart.

Each stage gets the weights that a worker hosting nothing else would give it: random generators, and what layers count
in their classes, begin each stage where they were when the first one began. Tied layers and the same stage of several
pipelines are made equal as stock DeepSpeed does it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from deepspeed.pipe import PipelineModule, TiedLayerSpec

from deepspeed_bamboo.core.grid import Coordinate
from deepspeed_bamboo.core.seating import Seat
from deepspeed_bamboo.runtime.comm.start_workers import StartWorkers
from deepspeed_bamboo.runtime.job.start import Start
from deepspeed_bamboo.runtime.stock.class_values import ClassValues
from deepspeed_bamboo.runtime.stock.given_parameters import BuiltLayers, GivenParameters
from deepspeed_bamboo.runtime.stock.likeness import REGISTER
from deepspeed_bamboo.runtime.stock.randomness import GeneratorStates

BLOCK = "bamboo_block"
"""Under which name a module keeps its :class:`StartBlock`."""


@dataclass
class StageLayers:
    """The layers of one stage: ``children`` by name (the layer's number), ``tied`` ones by key."""

    start: int
    stop: int
    children: dict[str, torch.nn.Module] = field(default_factory=dict)
    tied: dict[str, torch.nn.Module] = field(default_factory=dict)
    tied_attributes: dict[str, Any] = field(default_factory=dict)

    def tensors(self) -> Iterator[torch.Tensor]:
        """All parameters and buffers, in an order that is the same on all workers."""
        for _, module in (*sorted(self.tied.items()), *sorted(self.children.items())):
            yield from module.parameters()
            yield from module.buffers()

    def copied(self) -> StageLayers:
        """The same for another pipeline."""
        memo: dict[int, Any] = {}
        children = {name: _copied(child, memo) for name, child in self.children.items()}
        tied = {key: _copied(module, memo) for key, module in self.tied.items()}
        return StageLayers(self.start, self.stop, children, tied, dict(self.tied_attributes))

    def fill(self, module: PipelineModule) -> None:
        """Put the layers where ``PipelineModule._build`` would."""
        module._set_bounds(self.start, self.stop)
        module.forward_funcs, module.fwd_map = [], {}
        module.tied_modules = torch.nn.ModuleDict(self.tied)
        module.tied_weight_attrs = dict(self.tied_attributes)
        for index, spec in enumerate(module._layer_specs[self.start : self.stop], start=self.start):
            name = str(index)
            if name in self.children:
                module.fwd_map[name] = len(module.forward_funcs)
                module.add_module(name, self.children[name])
                module.forward_funcs.append(self.children[name])
            elif isinstance(spec, TiedLayerSpec):
                tied = self.tied[spec.key]
                module.forward_funcs.append(tied if spec.forward_fn is None else partial(spec.forward_fn, tied))
            else:
                module.forward_funcs.append(spec)
        for parameter in module.parameters():
            parameter.ds_pipe_replicated = False


class StartBlock:
    """What one worker builds at the start; kept with the module until ``initialize`` takes it apart."""

    def __init__(self, start: Start) -> None:
        self.start = start
        self.layers: dict[int, StageLayers] = {}
        self.given: GivenParameters | None = None  # what the script wants trained; set before the stages are apart

    @property
    def seat(self) -> Seat:
        """This worker's."""
        return self.start.seat

    # -- building ----------------------------------------------------------------------------------

    def build(self, module: PipelineModule) -> None:
        """In place of ``PipelineModule._build``: the layers of all stages of this worker."""
        before, after, kept = _Beginning.now(), None, None
        for stage in self.seat.stages:
            before.restore()
            module.tied_modules, module.tied_weight_attrs = torch.nn.ModuleDict(), {}
            first, stop = module.parts[stage], module.parts[stage + 1]
            module._set_bounds(first, stop)
            type(module)._build(module)
            self.layers[stage] = StageLayers(
                first, stop, tied=dict(module.tied_modules), tied_attributes=module.tied_weight_attrs
            )
            if stage == self.seat.primary.stage:
                after, kept = _Beginning.now(), before.counted.kept()
        if after is not None and kept is not None:
            after.restore()
            kept.restore()
        shown = [*reversed(self.layers.values())]
        module.tied_modules = torch.nn.ModuleDict({key: tied for one in shown for key, tied in one.tied.items()})
        module.tied_weight_attrs = {key: names for one in shown for key, names in one.tied_attributes.items()}
        module._set_bounds(min(one.start for one in shown), max(one.stop for one in shown))

    def equalize_tied(self, module: PipelineModule) -> None:
        """Give tied weights the value of the first stage that has them, as stock's constructor does; collective."""
        owners, me = self.seat.owners(), self.start.workers.index
        for key, stages in _tied_stages(module).items():
            pairs = {
                (owners[Coordinate(pipeline, stages[0])], owners[Coordinate(pipeline, stage)]): None
                for pipeline in range(self.seat.grid.pipelines)
                for stage in stages[1:]
            }
            for source, destination in pairs:
                if source != destination and me in (source, destination):
                    tied = module.tied_modules[key]
                    names = module.tied_weight_attrs[key]
                    weights = [module._recursive_getattr(tied, name) for name in names]
                    _hand_over(weights, self.start.workers, source=source, destination=destination)

    # -- taking apart ------------------------------------------------------------------------------

    def take_apart(self, module: PipelineModule) -> None:
        """Leave the stage of this worker's seat in ``module``, with its other stages kept here; collective.

        With several pipelines the same stage becomes equal in all of them, as stock's engine has it.
        """
        shown: set[str] = set()
        # What the script has seen, and may have passed on as parameters to train, goes to the stage of the seat.
        for layers in sorted(self.layers.values(), key=lambda one: one is not self.layers[self.seat.primary.stage]):
            names = (str(index) for index in range(layers.start, layers.stop))
            layers.children = {name: module._modules[name] for name in names if name in module._modules}
            layers.tied = {
                key: _copied(module.tied_modules[key], {}) if key in shown else module.tied_modules[key]
                for key in layers.tied
            }
            shown |= layers.tied.keys()
        self._separate()
        self._equalize_pipelines()
        for name in [name for name in module._modules if name.isdigit()]:
            del module._modules[name]
        self.layers[self.seat.primary.stage].fill(module)
        _mark_replicated(module, stage=self.seat.primary.stage)

    def others(self) -> Iterator[tuple[Coordinate, BuiltLayers]]:
        """The coordinates besides the first that this worker hosts, and their layers."""
        used = {self.seat.primary.stage}
        for coordinate in self.seat.hosted[1:]:
            layers = self.layers[coordinate.stage]
            own = layers.copied() if coordinate.stage in used else layers
            yield coordinate, BuiltLayers(own.fill, self.given)
            used.add(coordinate.stage)

    def _separate(self) -> None:
        """What layers of several stages use becomes each stage's own, as it is where every stage has its process."""
        taken: set[int] = set()
        for layers in sorted(self.layers.values(), key=lambda one: one is not self.layers[self.seat.primary.stage]):
            parts = {id(part): part for child in layers.children.values() for part in _parts(child)}
            if not taken.isdisjoint(parts):
                memo: dict[int, Any] = {
                    key: part for key, part in parts.items() if key not in taken and isinstance(part, torch.Tensor)
                }
                layers.children = {name: _copied(child, memo) for name, child in layers.children.items()}
            taken |= parts.keys()

    def _equalize_pipelines(self) -> None:
        owners, me, grid = self.seat.owners(), self.start.workers.index, self.seat.grid
        for stage in range(grid.stages):
            source = owners[Coordinate(0, stage)]
            others = dict.fromkeys(owners[Coordinate(pipeline, stage)] for pipeline in range(1, grid.pipelines))
            for destination in others:
                if source != destination and me in (source, destination):
                    _hand_over(self.layers[stage].tensors(), self.start.workers, source=source, destination=destination)


def block_of(module: Any) -> StartBlock | None:
    """What was built for a module, unless stock built it alone."""
    block = getattr(module, "__dict__", {}).get(BLOCK)
    return block if isinstance(block, StartBlock) else None


def _hand_over(tensors: Iterable[torch.Tensor], workers: StartWorkers, *, source: int, destination: int) -> None:
    for tensor in tensors:
        if workers.index == source:
            workers.send(tensor, to=destination)
        else:
            workers.receive(tensor, source=source)


def _tied_stages(module: PipelineModule) -> dict[str, list[int]]:
    """By key of tied layers the stages that have it, in order."""
    found: dict[str, set[int]] = {}
    for index, spec in enumerate(module._layer_specs):
        if isinstance(spec, TiedLayerSpec):
            found.setdefault(spec.key, set()).add(module.stage_owner(index))
    return {key: sorted(found[key]) for key in sorted(found)}


def _mark_replicated(module: PipelineModule, *, stage: int) -> None:
    """As stock does: tied weights count once, at the first stage that has them."""
    for key, stages in _tied_stages(module).items():
        if stage in stages[1:]:
            for parameter in module.tied_modules[key].parameters():
                parameter.ds_pipe_replicated = True


def _parts(module: torch.nn.Module) -> Iterator[Any]:
    yield from module.modules()
    yield from module.parameters()
    yield from module.buffers()


def _copied(module: torch.nn.Module, memo: dict[int, Any]) -> torch.nn.Module:
    """A copy with what the script has noted on parameters, and its hooks; torch copies their values only.

    ``memo``: by id what the copy has in place of parts of ``module``; what is copied is added.
    """
    known = set(map(id, memo.values()))
    copied = copy.deepcopy(module, memo)
    for old, new in zip(module.parameters(), copied.parameters(), strict=True):
        if old is new or id(new) in known:
            continue
        new.__dict__.update(old.__dict__)
        for kind, register in REGISTER.items() if new.requires_grad else ():
            for hook in (getattr(old, kind, None) or {}).values():
                getattr(new, register)(hook)
    return copied


@dataclass(frozen=True)
class _Beginning:
    """What the building of a stage begins with, apart from its arguments."""

    generators: GeneratorStates
    counted: ClassValues

    @classmethod
    def now(cls) -> _Beginning:
        on_gpu = torch.cuda.is_available()
        device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        return cls(GeneratorStates.now(device), ClassValues.now())

    def restore(self) -> None:
        self.generators.restore()
        self.counted.restore()
