"""Redundant forwards as CUDA graphs: one launch from the host in place of some hundreds.

Where a redundant forward keeps nothing for its backward (offload ``recompute``) it is the same sequence of kernels
each time, and on a fast GPU it is the host's launching that takes the time. So the first one is recorded, and the
following ones are replayed: input copied to where the recorded kernels read, output copied from where they write.
Random numbers stay what they were: torch gives a replay the generator's seed and offset of that moment.

A recording is right only as long as a forward would launch the same kernels on the same memory. What that
depends on and can be seen is compared each time (:func:`_fixed_state`); what can't be recorded, or shows in its first
forward that it decides something anew each time, is computed as ever, with one line that says why.
"""

from __future__ import annotations

import contextlib
import gc
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from deepspeed_bamboo.runtime.news import tell
from deepspeed_bamboo.runtime.replica import StageReplica, Tensors

if TYPE_CHECKING:
    from deepspeed_bamboo.runtime.engine import BambooPipelineEngine

# Micro-batches of different shapes: each takes a recording and memory of its own.
_MOST_SHAPES = 4
_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class Recording:
    """A recorded forward, the memory that it reads its input from, and that it writes its output to."""

    graph: Any
    inputs: Tensors
    outputs: Tensors

    def replay(self, inputs: Tensors) -> Tensors:
        """The output for ``inputs``, in memory of its own. Queued, not waited for."""
        for target, source in zip(_each(self.inputs), _each(inputs), strict=True):
            target.copy_(source)
        self.graph.replay()
        copies = tuple(output.clone() for output in _each(self.outputs))
        return copies[0] if isinstance(self.outputs, torch.Tensor) else copies


@dataclass
class StageGraphs:
    """What is recorded of one shadow's forward. Dropped with the replica.

    ``fixed``: what the recordings depend on besides their input; ``seen_in``: the iteration in which that was looked
    at. ``refusal``: why there will be no recordings.
    """

    fixed: tuple[Any, ...] = ()
    seen_in: tuple[int, int] = (-1, -1)
    recorded: dict[tuple[Any, ...], Recording] = field(default_factory=dict)
    refusal: str | None = None


class ForwardGraphs:
    """Records and replays the redundant forwards of one worker.

    Args:
        engine: whose forwards they are; its device is a GPU.
    """

    def __init__(self, engine: BambooPipelineEngine) -> None:
        self._engine = engine
        self._stream: Any = None
        # For benchmarks: forwards replayed, and device memory that the recordings hold.
        self.replays = 0
        self.pool_bytes = 0

    def forward(
        self, replica: StageReplica, micro_batch: int, *, plain: Callable[[], None], seed: Callable[[], None]
    ) -> None:
        """Do what ``plain`` does, a forward of ``replica`` without a graph of autograd's.

        ``seed`` sets the generators for it, as ``plain`` does. Raises what ``plain`` raises.
        """
        engine = self._engine
        graphs = replica.forward_graphs
        if graphs is None:
            graphs = replica.forward_graphs = StageGraphs()
        if graphs.refusal is not None or engine.dynamic_shape or engine.is_last_stage():
            plain()
            return
        self._drop_if_outdated(graphs, replica)
        inputs = engine.pipe_buffers["inputs"][micro_batch]
        shapes = tuple((tensor.shape, tensor.stride(), tensor.dtype) for tensor in _each(inputs))
        recording = graphs.recorded.get(shapes)
        if recording is not None:
            seed()
            self._keep(replica, micro_batch, recording.replay(inputs))
        elif len(graphs.recorded) >= _MOST_SHAPES:
            plain()
        else:
            seed()
            self._record_after(plain, replica, micro_batch, graphs=graphs, shapes=shapes)

    def _drop_if_outdated(self, graphs: StageGraphs, replica: StageReplica) -> None:
        """Once in an iteration and epoch, for it takes as long as some launches."""
        iteration = (self._engine.activity.index, self._engine.epoch)
        if graphs.seen_in == iteration:
            return
        fixed, graphs.seen_in = _fixed_state(replica), iteration
        if graphs.fixed != fixed:
            graphs.recorded.clear()
            graphs.fixed = fixed

    def _keep(self, replica: StageReplica, micro_batch: int, outputs: Tensors) -> None:
        """What a forward leaves behind besides its output, see the executor's."""
        self.replays += 1
        self._engine.pipe_buffers["outputs"][micro_batch] = outputs
        replica.retained_outputs[micro_batch] = outputs
        replica.progress = replica.progress._replace(forwards=micro_batch + 1)

    def _record_after(
        self,
        plain: Callable[[], None],
        replica: StageReplica,
        micro_batch: int,
        *,
        graphs: StageGraphs,
        shapes: tuple[Any, ...],
    ) -> None:
        """Run ``plain``, see whether it does the same each time, and record what it does.

        The generators must have been seeded for it, as ``plain`` does once more.
        """
        engine, started = self._engine, time.perf_counter()
        generators, buffers = _host_generators(), [buffer._version for buffer in replica.module.buffers()]
        plain()
        if _host_generators() != generators:
            graphs.refusal = "a layer draws random numbers on the host"
        elif [buffer._version for buffer in replica.module.buffers()] != buffers:
            graphs.refusal = "a layer changes its buffers"
        elif _fixed_state(replica) != graphs.fixed:
            graphs.refusal = "a layer counts its forwards"
        else:
            recording = self._record(micro_batch)
            if isinstance(recording, Recording):
                graphs.recorded[shapes] = recording
                engine.log_event(
                    "forward_recorded",
                    coordinate=str(replica.coordinate),
                    seconds=time.perf_counter() - started,
                    pool_bytes=self.pool_bytes,
                )
                return
            graphs.refusal = recording
        tell(engine, f"no CUDA graph of stage {replica.coordinate.stage}'s redundant forward: {graphs.refusal}")

    def _record(self, micro_batch: int) -> Recording | str:
        """The forward of the engine's active stage, recorded; or why that can't be done."""
        engine, graph, cuda = self._engine, torch.cuda.CUDAGraph(), torch.cuda
        self._stream = self._stream or cuda.Stream(engine.device)  # type: ignore[no-untyped-call]
        reserved = cuda.memory_reserved(engine.device)
        buffers = engine.pipe_buffers
        inputs, outputs = buffers["inputs"][micro_batch], buffers["outputs"][micro_batch]
        copies = tuple(tensor.detach().clone() for tensor in _each(inputs))
        static = copies[0] if isinstance(inputs, torch.Tensor) else copies
        main = cuda.current_stream(engine.device)
        self._stream.wait_stream(main)
        buffers["inputs"][micro_batch] = static
        try:
            with torch.no_grad(), cuda.stream(self._stream), _no_collection():
                refusal = _recorded_into(graph, lambda: engine.stock_forward(buffer_id=micro_batch), engine.device)
            if refusal is not None:
                return refusal
            self.pool_bytes += cuda.memory_reserved(engine.device) - reserved
            return Recording(graph, static, _detached(buffers["outputs"][micro_batch]))
        finally:
            buffers["inputs"][micro_batch], buffers["outputs"][micro_batch] = inputs, outputs
            main.wait_stream(self._stream)


def forward_graphs(engine: BambooPipelineEngine) -> ForwardGraphs | None:
    """What replays the redundant forwards of ``engine``'s worker, where it is asked for and there is a GPU."""
    wanted = engine.session.config.redundancy.cuda_graphs and engine.device.type == "cuda"
    return ForwardGraphs(engine) if wanted else None


def _recorded_into(graph: Any, body: Callable[[], None], device: torch.device) -> str | None:
    """Record what ``body`` launches on the current stream; returns why that failed, if it did."""
    pool = torch.cuda.graph_pool_handle()
    # Without torch.cuda.graph, which waits for the device: for what a peer may never send.
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        body()
        graph.capture_end()
    except BaseException as error:
        _clean_up(graph, pool, device)
        if not isinstance(error, RuntimeError):
            raise
        return str(error).strip().splitlines()[0]
    return None


def _clean_up(graph: Any, pool: Any, device: torch.device) -> None:
    """After a recording that failed. Torch leaves its generator and its memory in the middle of one.

    There the generator draws no more, and what was used on two streams is never free again.
    """
    with contextlib.suppress(RuntimeError):
        graph.capture_end()
    with contextlib.suppress(RuntimeError):
        torch._C._cuda_endAllocateToPool(device.index or 0, pool)
    fresh = torch.Generator(device)
    torch.cuda.default_generators[device.index or 0].graphsafe_set_state(fresh.graphsafe_get_state())


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """A collected CUDA object would end a recording."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _fixed_state(replica: StageReplica) -> tuple[Any, ...]:
    """What a recording takes for granted: where weights and buffers are, and the numbers and flags that layers hold."""
    module = replica.module
    addresses = tuple(tensor.data_ptr() for kind in (module.parameters(), module.buffers()) for tensor in kind)
    settings = tuple(
        value
        for layer in module.modules()
        if layer is not module
        for value in vars(layer).values()
        if type(value) in _PLAIN
    )
    return module.training, addresses, settings


def _host_generators() -> tuple[Any, ...]:
    numpy = sys.modules.get("numpy")
    drawn: tuple[Any, ...] = ()
    if numpy is not None:
        state = numpy.random.get_state()
        drawn = (state[1].tobytes(), *state[2:])
    return random.getstate(), drawn, bytes(torch.default_generator.get_state().tolist())


def _each(tensors: Tensors) -> tuple[torch.Tensor, ...]:
    return (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors)


def _detached(outputs: Tensors) -> Tensors:
    return outputs.detach() if isinstance(outputs, torch.Tensor) else tuple(tensor.detach() for tensor in outputs)
