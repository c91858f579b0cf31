"""Recorded redundant forwards: what is recorded, when a recording is dropped, and what is never recorded."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepspeed_bamboo.core.grid import Coordinate
from deepspeed_bamboo.core.progress import CoordinateProgress
from deepspeed_bamboo.runtime.forward_graphs import ForwardGraphs, Recording
from deepspeed_bamboo.runtime.replica import StageReplica

ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, whose kernels are recorded")
WHERE = [pytest.param("cpu", id="stand-in"), pytest.param("cuda", id="gpu", marks=ON_GPU)]


class StandIn:
    """For a graph where there is no GPU: a replay calls the module. ``replayed`` counts."""

    def __init__(self, inputs: torch.Tensor, outputs: torch.Tensor, forward: Callable[[torch.Tensor], Any]) -> None:
        self._inputs, self._outputs, self._forward = inputs, outputs, forward

    def replay(self) -> None:
        with torch.no_grad():
            self._outputs.copy_(self._forward(self._inputs))


class Stage(torch.nn.Module):
    """A stage's module: a linear layer, dropout, and what ``extra`` does to the result."""

    def __init__(self, extra: Callable[[Stage, torch.Tensor], torch.Tensor] | None = None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer = Layer(extra)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)  # type: ignore[no-any-return]


class Layer(torch.nn.Module):
    def __init__(self, extra: Callable[[Any, torch.Tensor], torch.Tensor] | None) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
        self.dropout = torch.nn.Dropout(0.5)
        self.register_buffer("seen", torch.zeros(()))
        self.calls, self.scale = 0, 1.0
        self._extra = extra

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.dropout(self.linear(x)) * self.scale
        return y if self._extra is None else self._extra(self, y)


class Worker:
    """Runs forwards of one shadow, recorded and plain, with what of an engine they need."""

    def __init__(self, device: str, monkeypatch: pytest.MonkeyPatch, stage: Stage | None = None) -> None:
        self.module = (stage or Stage()).to(device)
        self.replica = StageReplica(Coordinate(0, 1), {"module": self.module}, [])
        self.engine = SimpleNamespace(
            device=torch.device(device, 0) if device == "cuda" else torch.device(device),
            pipe_buffers={"inputs": [None] * 4, "outputs": [None] * 4},
            stock_forward=self._stock_forward,
            dynamic_shape=False,
            is_last_stage=lambda: False,
            epoch=0,
            activity=SimpleNamespace(index=0),
            log_event=lambda *args, **fields: self.events.append((*args, fields)),
            session=SimpleNamespace(worker="w0"),
        )
        self.events: list[Any] = []
        self.graphs = ForwardGraphs(self.engine)  # type: ignore[arg-type]
        if device == "cpu":
            monkeypatch.setattr(self.graphs, "_record", self._stand_in)

    def forward(self, inputs: torch.Tensor, *, seed: int = 1) -> torch.Tensor:
        """As a redundant forward; its result."""
        self._prepare(inputs)
        with torch.no_grad():
            self.graphs.forward(self.replica, 0, plain=lambda: self._plain(seed), seed=lambda: self._seed(seed))
        assert self.replica.progress.forwards == 1
        return self.replica.retained_outputs[0]  # type: ignore[return-value]

    def plain(self, inputs: torch.Tensor, *, seed: int = 1) -> torch.Tensor:
        """What it should be."""
        self._prepare(inputs)
        with torch.no_grad():
            self._plain(seed)
        return self.replica.retained_outputs[0]  # type: ignore[return-value]

    def next_iteration(self) -> None:
        self.engine.activity.index += 1

    @property
    def refusal(self) -> str | None:
        return self.replica.forward_graphs.refusal  # type: ignore[no-any-return]

    def _prepare(self, inputs: torch.Tensor) -> None:
        self.replica.progress = CoordinateProgress()
        self.engine.pipe_buffers["inputs"][0] = inputs.to(self.engine.device)

    def _seed(self, seed: int) -> None:
        random.seed(seed)
        torch.manual_seed(seed)

    def _plain(self, seed: int) -> None:
        self._seed(seed)
        self._stock_forward(0)
        self.replica.retained_outputs[0] = self.engine.pipe_buffers["outputs"][0]
        self.replica.progress = self.replica.progress._replace(forwards=1)

    def _stock_forward(self, buffer_id: int) -> None:
        buffers = self.engine.pipe_buffers
        buffers["outputs"][buffer_id] = self.module(buffers["inputs"][buffer_id].clone())

    def _stand_in(self, micro_batch: int) -> Recording:
        inputs = self.engine.pipe_buffers["inputs"][micro_batch].clone()
        outputs = torch.empty_like(inputs)
        return Recording(StandIn(inputs, outputs, self.module), inputs, outputs)


def numbers(seed: int, rows: int = 2) -> torch.Tensor:
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("device", WHERE)
def test_replays_are_bitwise_what_a_forward_gives(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(device, monkeypatch)
    # On a CPU the stand-in's dropout draws from the generator that also counts as the host's.
    worker.module.layer.dropout.p = 0.5 if device == "cuda" else 0.0
    results = [worker.forward(numbers(k), seed=k) for k in range(4)]
    assert worker.graphs.replays == 3
    assert [event for event, _ in worker.events] == ["forward_recorded"]
    for k, result in enumerate(results):
        assert torch.equal(result, worker.plain(numbers(k), seed=k)), k
    assert not torch.equal(results[1], results[2])


def without_dropout(extra: Callable[[Any, torch.Tensor], torch.Tensor] | None = None) -> Stage:
    stage = Stage(extra)
    stage.layer.dropout.p = 0.0
    return stage


@pytest.mark.parametrize("device", WHERE)
def test_weights_may_change_in_place_and_nowhere_else(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(device, monkeypatch, without_dropout())
    worker.forward(numbers(0))
    with torch.no_grad():
        worker.module.layer.linear.weight.mul_(2.0)
    worker.next_iteration()
    assert torch.equal(worker.forward(numbers(1)), worker.plain(numbers(1)))
    assert worker.graphs.replays == 1

    moved = worker.module.layer.linear.weight.detach().clone() * 3.0
    worker.module.layer.linear.weight = torch.nn.Parameter(moved)
    worker.next_iteration()
    assert torch.equal(worker.forward(numbers(2)), worker.plain(numbers(2)))
    assert worker.graphs.replays == 1, "a recording that reads where the weights were was replayed"
    assert torch.equal(worker.forward(numbers(3)), worker.plain(numbers(3)))
    assert worker.graphs.replays == 2


@pytest.mark.parametrize("device", WHERE)
def test_what_a_layer_is_set_to_is_looked_at_in_each_iteration(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(device, monkeypatch, without_dropout())
    worker.forward(numbers(0))
    worker.module.layer.scale = 2.0
    worker.next_iteration()
    assert torch.equal(worker.forward(numbers(1)), worker.plain(numbers(1)))
    assert worker.graphs.replays == 0


@pytest.mark.parametrize("device", WHERE)
def test_each_shape_has_its_recording_up_to_a_few(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(device, monkeypatch, without_dropout())
    for rows in (1, 2, 3, 4, 5, 6):
        worker.forward(numbers(rows, rows=rows))
    assert (len(worker.replica.forward_graphs.recorded), worker.graphs.replays) == (4, 0)
    for rows in (1, 2, 3, 4, 5, 6):
        assert torch.equal(worker.forward(numbers(9, rows=rows)), worker.plain(numbers(9, rows=rows)))
    assert worker.graphs.replays == 4


def draws(layer: Any, y: torch.Tensor) -> torch.Tensor:
    return y * (1.0 + random.random())


def counts(layer: Any, y: torch.Tensor) -> torch.Tensor:
    layer.calls += 1
    return y * layer.calls


def notes(layer: Any, y: torch.Tensor) -> torch.Tensor:
    layer.seen += 1
    return y * layer.seen


def asks(layer: Any, y: torch.Tensor) -> torch.Tensor:
    return y * 2.0 if float(y.sum()) > 0 else y


@pytest.mark.parametrize("device", WHERE)
@pytest.mark.parametrize(
    ("extra", "why"),
    [
        (draws, "draws random numbers on the host"),
        (counts, "counts its forwards"),
        (notes, "changes its buffers"),
        pytest.param(asks, "captur", marks=ON_GPU),
    ],
)
def test_what_decides_anew_each_time_is_not_recorded(
    device: str, extra: Any, why: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if extra is asks and device == "cpu":
        pytest.skip("needs a recording that can fail: one of a GPU's kernels")
    worker, other = (Worker(device, monkeypatch, without_dropout(extra)) for _ in range(2))
    results = [worker.forward(numbers(k), seed=k) for k in range(3)]
    for k, result in enumerate(results):
        assert torch.equal(result, other.plain(numbers(k), seed=k)), k
    assert worker.graphs.replays == 0
    assert worker.refusal is not None
    assert why in worker.refusal
    news = capsys.readouterr().err.strip().splitlines()
    assert len(news) == 1
    assert "no CUDA graph of stage 1's redundant forward" in news[0]


@ON_GPU
def test_a_recording_that_failed_leaves_generator_and_memory_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker("cuda", monkeypatch, Stage(asks))
    worker.forward(numbers(0))
    assert worker.refusal is not None
    ones = torch.ones(1000, device="cuda")
    assert 0 < int((torch.nn.functional.dropout(ones, 0.5) == 0).sum()) < 1000
    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    for _ in range(3):
        tensor = torch.empty(2**20, device="cuda")
        with torch.cuda.stream(stream):
            tensor.add_(1)
        tensor.record_stream(stream)
        del tensor
        torch.cuda.synchronize()
    statistics = torch.cuda.memory_stats()
    waiting = statistics["active_bytes.all.current"] - statistics["allocated_bytes.all.current"]
    assert waiting <= 2**22, "what was used on two streams is never free again"


def test_a_last_stage_and_changing_shapes_are_never_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("is_last_stage", lambda: True), ("dynamic_shape", True)):
        worker = Worker("cpu", monkeypatch, without_dropout())
        setattr(worker.engine, name, value)
        for k in range(3):
            assert torch.equal(worker.forward(numbers(k)), worker.plain(numbers(k)))
        assert (worker.graphs.replays, worker.replica.forward_graphs.recorded) == (0, {})
