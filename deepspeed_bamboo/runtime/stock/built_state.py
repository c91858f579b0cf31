"""What stock DeepSpeed has built in the engine becomes the first replica of this worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepspeed import comm as deepspeed_comm

from deepspeed_bamboo.core.grid import Coordinate, Grid
from deepspeed_bamboo.runtime.stock.class_values import BEGINNING
from deepspeed_bamboo.runtime.stock.hosting import stock_twins, use_logical_groups
from deepspeed_bamboo.runtime.stock.patches.throughput_timer import let_the_device_run
from deepspeed_bamboo.runtime.stock.replica import count_in_global_norm, tied_groups
from deepspeed_bamboo.runtime.stock.start_block import BLOCK

if TYPE_CHECKING:
    from deepspeed_bamboo.runtime.engine import BambooPipelineEngine


def take_over_stock_state(engine: BambooPipelineEngine, grid: Grid) -> None:
    """Put logical groups where stock put process groups, and keep its stage as the first replica."""
    coordinate = Coordinate(engine.grid.data_parallel_id, engine.grid.stage_id)
    process_rank = deepspeed_comm.get_rank()
    logical = engine.host.logical_grid(coordinate, topology=engine.module._topo, process_rank=process_rank)
    twins = stock_twins(engine.grid, logical)
    use_logical_groups(engine.optimizer, twins)
    use_logical_groups(engine, twins)
    if engine.optimizer is not None and getattr(engine.optimizer, "mpu", None) is not None:
        engine.optimizer.mpu = logical
    if hasattr(engine.optimizer, "overflow_checker"):
        engine.optimizer.overflow_checker.mpu = logical
    engine.module._grid = logical
    engine.module.tied_comms = tied_groups(engine.module, coordinate=coordinate, grid=grid, exchange=engine.exchange)
    if engine.session.config.gradient_norm == "global":
        count_in_global_norm(engine.module)
    engine.grid = logical
    engine.mpu = logical
    let_the_device_run(engine)
    block = engine.module.__dict__.pop(BLOCK, None)
    engine.host.beginning = engine.module.__dict__.pop(BEGINNING, None)
    replica = engine.host.adopt_primary(coordinate, logical)
    for group in replica.groups:
        group.name_ranks(process_rank)
    for other, layers in () if block is None else block.others():
        engine.host.own(other, process_rank=process_rank, layers=layers)
