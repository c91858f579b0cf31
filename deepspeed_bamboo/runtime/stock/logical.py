"""Process groups and the grid as stock DeepSpeed sees them: made of coordinates, not of processes.

A coordinate keeps its logical rank for the whole job, whichever worker hosts it. Stock code keeps calling
``dist.all_reduce(tensor, group=...)``; the group below passes the call on to whoever currently serves
collectives: DeepSpeed's own groups while the engine is being built, the plugin's exchange afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from deepspeed.runtime.pipe.topology import PipelineParallelGrid
from torch.distributed import distributed_c10d

from deepspeed_bamboo.core.grid import Coordinate, Grid
from deepspeed_bamboo.runtime.comm.c10d import ProcessGroup, c10d
from deepspeed_bamboo.runtime.stock.several_ranks import as_rank


class GroupKey(NamedTuple):
    """Names a logical group: the coordinates in it, in logical rank order, and what it is for."""

    kind: str
    members: tuple[Coordinate, ...]


class Exchange(Protocol):
    """Serves the collectives of one coordinate."""

    def __call__(self, group: GroupKey, operation: str, tensor: torch.Tensor) -> torch.Tensor:
        """The reduced (or broadcast) value of ``tensor`` over the group."""


class FinishedWork:
    """The work handle of a collective that is complete when it returns."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


# The operation of which the answer is everybody's tensor, in one dimension.
GATHER = "gather"
REDUCTIONS = {
    c10d.ReduceOp.SUM: "sum",
    c10d.ReduceOp.MAX: "max",
    c10d.ReduceOp.MIN: "min",
    c10d.ReduceOp.AVG: "mean",
}


class LogicalGroup(ProcessGroup):
    """A process group whose members are coordinates.

    Args:
        key: the members, of which ``coordinate`` is one.
        coordinate: the coordinate on whose behalf this object is used.
        exchange: serves the collectives; looked up at every call, so it can change with the epoch.

    With ``answers_on_host`` a reduced number replaces the caller's where it arrived, on the host.
    """

    answers_on_host = False

    def __init__(self, key: GroupKey, *, coordinate: Coordinate, exchange: Callable[[], Exchange]) -> None:
        super().__init__(key.members.index(coordinate), len(key.members))
        self.key = key
        self.coordinate = coordinate
        self._exchange = exchange

    def name_ranks(self, process_rank: int) -> None:
        """Tell torch the group ranks; needed again whenever the default group changes.

        This process has the coordinate's rank. The other members get made-up global ranks below zero, which
        is enough for stock code that translates a group rank to a global one and back.
        """
        own = self.rank()
        distributed_c10d._world.pg_group_ranks[self] = {
            process_rank if index == own else -1 - index: index for index in range(self.size())
        }

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return "bamboo-logical"

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> FinishedWork:
        operation = "sum"
        if opts is not None:
            operation = REDUCTIONS.get(getattr(opts.reduceOp, "op", opts.reduceOp), "")
            if not operation:
                raise NotImplementedError(f"logical groups reduce by sum, max, min and mean, not {opts.reduceOp}")
        for tensor in tensors:
            self._replace(tensor, operation)
        return FinishedWork()

    def reduce(self, tensors: list[torch.Tensor], opts: Any) -> FinishedWork:
        if getattr(opts.reduceOp, "op", opts.reduceOp) != c10d.ReduceOp.SUM:
            raise NotImplementedError(f"logical groups reduce to one member by sum, not {opts.reduceOp}")
        for tensor in tensors:
            self._replace(tensor if self.rank() == opts.rootRank else tensor.clone(), "sum")
        return FinishedWork()

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> FinishedWork:
        for tensor in tensors:
            self._replace(tensor, f"broadcast:{opts.rootRank}")
        return FinishedWork()

    def barrier(self, opts: Any = None) -> FinishedWork:
        self._replace(torch.zeros(1), "sum")
        return FinishedWork()

    def _allgather_base(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> FinishedWork:
        own = tensor.reshape(-1)
        gathered = own if self.size() == 1 else self._exchange()(self.key, GATHER, own)
        output.reshape(-1).copy_(gathered)
        return FinishedWork()

    # torch renamed the single-tensor gather; both names reach the same code.
    all_gather_single = _allgather_base

    def allgather(
        self, outputs: list[list[torch.Tensor]], tensors: list[torch.Tensor], opts: Any = None
    ) -> FinishedWork:
        for output, tensor in zip(outputs, tensors, strict=True):
            if self.size() == 1:
                output[0].copy_(tensor)
                continue
            gathered = self._exchange()(self.key, GATHER, tensor.reshape(-1)).view(self.size(), -1)
            for part, value in zip(output, gathered, strict=True):
                part.copy_(value.view_as(part))
        return FinishedWork()

    def _replace(self, tensor: torch.Tensor, operation: str) -> None:
        if self.size() == 1:
            return
        answer = self._exchange()(self.key, operation, tensor)
        if answer is tensor:
            return
        if self.answers_on_host and answer.numel() == 1:
            tensor.data = answer.to("cpu").reshape(tensor.shape)
        else:
            tensor.copy_(answer.reshape(tensor.shape))


class LogicalGrid(PipelineParallelGrid):
    """DeepSpeed's grid object for one coordinate, with logical groups in it.

    Unlike its parent it creates no process groups, so it can be made at any time, by one worker alone.
    """

    def __init__(
        self,
        *,
        topology: Any,
        grid: Grid,
        coordinate: Coordinate,
        exchange: Callable[[], Exchange],
        process_rank: int,
        stages_here: Callable[[], Sequence[int]] = tuple,
        group_to_script: Callable[[str], Any] = lambda kind: None,
    ) -> None:
        """``stages_here``: returns the stages of this pipeline that a script may be told of, besides its own.

        ``group_to_script``: returns the group of a kind that a script gets, and None where it is stock that asks.
        """
        self._stages_here = stages_here
        self._group_to_script = group_to_script
        self._topo = topology
        self.global_rank = grid.rank(coordinate)
        self.world_size = len(grid)
        self.data_parallel_size = grid.pipelines
        self.pipe_parallel_size = grid.stages
        self.model_parallel_size = 1
        self.slice_parallel_size = 1
        self.stage_id = coordinate.stage
        self.data_parallel_id = coordinate.pipeline
        pipeline = tuple(Coordinate(coordinate.pipeline, stage) for stage in range(grid.stages))
        stage = tuple(Coordinate(pipeline_id, coordinate.stage) for pipeline_id in range(grid.pipelines))

        def group(kind: str, members: tuple[Coordinate, ...]) -> LogicalGroup:
            return LogicalGroup(GroupKey(kind, members), coordinate=coordinate, exchange=exchange)

        self.ds_model_proc_group = group("model", pipeline)
        self.ds_model_world_size = grid.stages
        self.ds_model_rank = coordinate.stage
        self.dp_proc_group = group("data", stage)
        self.dp_group = [grid.rank(c) for c in stage]
        self.dp_groups = topology.get_axis_comm_lists("data")
        self.pp_proc_group = group("pipe", pipeline)
        self.pp_group = [grid.rank(c) for c in pipeline]
        self.pipe_groups = topology.get_axis_comm_lists("pipe")
        self.slice_proc_group = group("slice", (coordinate,))
        self.slice_group = [self.global_rank]
        self.is_first_stage = coordinate.stage == 0
        self.is_last_stage = coordinate.stage == grid.stages - 1
        self.p2p_groups = self._build_p2p_groups()
        for logical_group in (self.ds_model_proc_group, self.dp_proc_group, self.pp_proc_group, self.slice_proc_group):
            logical_group.name_ranks(process_rank)

    def get_pipe_parallel_group(self) -> Any:
        """The pipeline's; to a script one that continues after losses, as those that it makes."""
        return self._group_to_script("pipe") or self.pp_proc_group

    def get_model_parallel_group(self) -> Any:
        """The pipeline's, too."""
        return self._group_to_script("model") or self.ds_model_proc_group

    def get_data_parallel_group(self) -> Any:
        """That of the same stage of all pipelines, likewise."""
        return self._group_to_script("data") or self.dp_proc_group

    def get_stage_id(self) -> int:
        """The stage; to a script whose worker hosts several of this pipeline, a number that is equal to each."""
        return as_rank([self.stage_id, *(stage for stage in self._stages_here() if stage != self.stage_id)])
