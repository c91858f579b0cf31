"""From the moment at which a script makes its PipelineModule stock DeepSpeed sees the logical grid, not the workers.

The number of stages is known only then. With as many workers as coordinates nothing changes.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.pipe import PipelineModule

from deepspeed_bamboo.core.grid import Grid
from deepspeed_bamboo.core.seating import Seat, logical_grid
from deepspeed_bamboo.errors import ConfigError
from deepspeed_bamboo.runtime.comm.c10d import c10d
from deepspeed_bamboo.runtime.comm.start_workers import StartWorkers
from deepspeed_bamboo.runtime.job.start import Start
from deepspeed_bamboo.runtime.stock.class_values import BEGINNING, ClassValues
from deepspeed_bamboo.runtime.stock.script_groups import ScriptGroups
from deepspeed_bamboo.runtime.stock.start_block import BLOCK, StartBlock
from deepspeed_bamboo.runtime.stock.world import (
    AloneGroup,
    StartGroup,
    WorldGroup,
    replace_default_group,
    set_default_group_aside,
)


class LogicalWorld:
    """Decides on the grid when the first PipelineModule is made, and puts this worker on its seat.

    Args:
        pipelines: how many there are; None: as many as the workers fill, and at least one.
        groups: those that the script makes.
    """

    def __init__(self, *, pipelines: Callable[[], int | None], groups: ScriptGroups) -> None:
        self._pipelines = pipelines
        self._groups = groups
        self._start: Start | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, every PipelineModule that is made is made for the logical grid."""
        stock = PipelineModule.__init__
        signature = inspect.signature(stock)

        @functools.wraps(stock)
        def construct(module: PipelineModule, *args: Any, **kwargs: Any) -> None:
            arguments = signature.bind_partial(module, *args, **kwargs).arguments
            start = self._start_for(arguments.get("num_stages"), arguments.get("topology"))
            module.__dict__[BEGINNING] = ClassValues.now()
            if start is None:
                stock(module, *args, **kwargs)
                return
            block = StartBlock(start)
            module.__dict__["_build"] = functools.partial(block.build, module)
            try:
                stock(module, *args, **kwargs)
            finally:
                module.__dict__.pop("_build", None)
            block.equalize_tied(module)
            module.__dict__[BLOCK] = block

        PipelineModule.__init__ = construct
        try:
            yield
        finally:
            PipelineModule.__init__ = stock

    def _start_for(self, stages: int | None, topology: Any) -> Start | None:
        """This worker's start; None where stock sees what there is."""
        if not c10d.is_initialized():
            return None
        if self._start is not None and isinstance(torch.distributed.group.WORLD, StartGroup):
            same = stages if topology is None else topology.get_dim("pipe")
            return self._start if same == self._start.seat.grid.stages else None
        workers = c10d.get_world_size()
        grid = self._grid(stages, topology, workers=workers)
        if grid is None or len(grid) == workers or _has_stood_in():
            return None
        self._start = enter(grid, groups=self._groups)
        return self._start

    def _grid(self, stages: int | None, topology: Any, *, workers: int) -> Grid | None:
        configured = self._pipelines()
        if topology is None:
            return logical_grid(stages=stages, workers=workers, pipelines=configured) if stages else None
        if set(topology.get_axis_names()) != {"pipe", "data"}:
            return None  # tensor parallelism, which initialize refuses
        stages, pipelines = topology.get_dim("pipe"), topology.get_dim("data")
        if stages < 1 or pipelines < 1:
            raise ConfigError(
                f"the topology given to PipelineModule has {pipelines} x {stages} (pipelines x stages) for {workers} "
                "workers, and needs at least 1 x 1; name as many pipelines as are to be trained, however many "
                "workers there are, or pass num_stages instead"
            )
        if configured is not None and pipelines != configured:
            raise ConfigError(
                f"the topology given to PipelineModule has {pipelines} pipelines, but topology.pipelines of the bamboo "
                f"section is {configured}; make them equal, or leave one of them out"
            )
        return Grid(pipelines, stages)


def enter(grid: Grid, *, groups: ScriptGroups) -> Start:
    """From now on torch and DeepSpeed see ``grid``; returns where this worker is in it. Nobody else is asked."""
    workers = StartWorkers(set_default_group_aside(groups))
    seat = Seat(grid, index=workers.index, workers=workers.count)
    owners = seat.owners()
    groups.rename([grid.rank(Seat(grid, index=i, workers=workers.count).primary) for i in range(workers.count)])

    def gather(tensor: torch.Tensor) -> list[torch.Tensor]:
        values = workers.gather(tensor)
        return [values[owners[grid.coordinate(rank)]] for rank in range(len(grid))]

    replace_default_group(StartGroup(grid.rank(seat.primary), len(grid), gather=gather, groups=groups))
    return Start(seat, workers)


def _has_stood_in() -> bool:
    """Whether the default group is one of the plugin's own already."""
    return isinstance(torch.distributed.group.WORLD, (WorldGroup, AloneGroup))
