"""What stands in the way of a start is said all at once, whichever part finds it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.moe.experts import Experts
from deepspeed.moe.layer import MoE
from deepspeed.pipe import LayerSpec, PipelineModule

from deepspeed_bamboo.config.section import parse_bamboo_section
from deepspeed_bamboo.core.grid import Grid
from deepspeed_bamboo.core.seating import Seat
from deepspeed_bamboo.errors import ConfigError
from deepspeed_bamboo.runtime import initialize
from deepspeed_bamboo.runtime.membership import starting
from deepspeed_bamboo.runtime.stock.meeting_layers import meeting_layers
from deepspeed_bamboo.runtime.stock.recounting import counts_twice
from deepspeed_bamboo.runtime.stock.root_modules import modules_of_its_own
from deepspeed_bamboo.runtime.stock.scripted_layers import scripted_layers
from deepspeed_bamboo.runtime.stock.sparse_gradients import has_sparse, sparse_layers


class Topology:
    """Two stages, one pipeline."""

    def get_dim(self, axis: str) -> int:
        return {"pipe": 2, "data": 1}[axis]

    def get_axis_names(self) -> list[str]:
        return ["pipe", "data"]

    def world_size(self) -> int:
        return 2

    def get_coord(self, rank: int) -> Any:
        return SimpleNamespace(pipe=rank, data=0)


def test_zero_an_empty_stage_pipelines_and_an_optimizer_object_are_told_together() -> None:
    model: Any = PipelineModule.__new__(PipelineModule)
    torch.nn.Module.__init__(model)
    model._topo, model.parts, model.num_stages = Topology(), [0, 3, 3], 2
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.raises(ConfigError) as raised:
        initialize._validate(
            {"zero_optimization": {"stage": 3}},
            {"model": model, "optimizer": optimizer},
            parse_bamboo_section({"topology": {"pipelines": 2}}),
            seat=Seat(Grid(1, 2), 0, 1),
        )
    told = str(raised.value)
    assert len(raised.value.problems) == 5
    parts = ("can't be divided", "stage is 3", "stage 1 of 2 has no layers", "pipelines is 2", "pass a function")
    for part in parts:
        assert part in told


def test_an_optimizer_that_is_to_be_made_later_needs_a_worker_for_each_stage() -> None:
    (told,) = initialize._problems_with_optimizer(None, Seat(Grid(1, 4), 0, 2), configured=False)
    assert "2 workers host 4 stages" in told and "start 4 workers" in told
    assert not list(initialize._problems_with_optimizer(None, Seat(Grid(1, 4), 0, 2), configured=True))
    assert not list(initialize._problems_with_optimizer(None, Seat(Grid(1, 4), 0, 5), configured=False))
    assert not list(initialize._problems_with_optimizer(None, None, configured=False))


def test_paths_that_mean_something_else_on_a_node_are_told_by_the_first_worker(
    capsys: pytest.CaptureFixture[str],
) -> None:
    told = {
        "w0": {"checkpoint.dir": "/home/a/kept", "event_log": "/logs"},
        "w1": {"checkpoint.dir": "/home/a/kept", "event_log": "/logs"},
        "w2": {"checkpoint.dir": "/home/b/kept", "event_log": "/logs"},
    }
    for me in told:
        starting._say_where_paths_differ(_speaker(me), told)
    said = capsys.readouterr().err
    assert said.count("checkpoint.dir is /home/a/kept on w0, but /home/b/kept on w2; give a path") == 1
    assert "event_log" not in said


def test_what_recounts_is_told_once_if_one_worker_has_it(capsys: pytest.CaptureFixture[str]) -> None:
    for told in ({"w0": False, "w1": False}, {"w0": False, "w1": True}):
        for me in told:
            starting._say_what_recounts(_speaker(me), told)
    assert capsys.readouterr().err.count("running statistics differ in last bits") == 1


def test_running_statistics_under_activation_checkpoints_count_twice() -> None:
    def module(interval: int, layer: torch.nn.Module) -> Any:
        return SimpleNamespace(activation_checkpoint_interval=interval, modules=lambda: [torch.nn.ReLU(), layer])

    assert counts_twice(module(1, torch.nn.BatchNorm1d(3)))
    assert not counts_twice(module(0, torch.nn.BatchNorm1d(3)))
    assert not counts_twice(module(1, torch.nn.BatchNorm1d(3, track_running_stats=False)))
    assert not counts_twice(module(1, torch.nn.LayerNorm(3)))


def test_layers_with_sparse_gradients_are_refused_by_name_on_every_worker() -> None:
    trained, frozen = torch.nn.Embedding(5, 2, sparse=True), torch.nn.Embedding(5, 2, sparse=True)
    frozen.requires_grad_(False)
    layers = torch.nn.Sequential(trained, frozen, torch.nn.Embedding(5, 2), torch.nn.EmbeddingBag(5, 2, sparse=True))
    found = sparse_layers(layers)
    assert found == ["0 (Embedding)", "3 (EmbeddingBag)"]
    trained(torch.tensor([1])).sum().backward()
    assert trained.weight.grad is not None and has_sparse([trained.weight.grad]) and not has_sparse([torch.zeros(2)])
    flushed: list[float] = []
    worker = SimpleNamespace(links=SimpleNamespace(flush=lambda within_seconds: flushed.append(within_seconds)))
    starting.refuse_sparse(worker, [])  # type: ignore[arg-type]
    assert not flushed
    with pytest.raises(ConfigError) as raised:
        starting.refuse_sparse(worker, found)  # type: ignore[arg-type]
    assert flushed and len(raised.value.problems) == 2
    for part in ("layer 0 (Embedding)", "sparse=False", '"off"'):
        assert part in str(raised.value)


def test_layers_that_meet_other_workers_within_an_iteration_are_refused_on_every_rank() -> None:
    def found(own: torch.nn.Module, *listed: object, ranks: int = 2) -> list[str]:
        module: Any = torch.nn.Sequential(own)
        module._layer_specs = listed
        return meeting_layers(module, ranks=ranks)

    linear, synced = torch.nn.Linear(2, 2), torch.nn.SyncBatchNorm(2)
    assert not found(linear, LayerSpec(torch.nn.BatchNorm1d, 2), torch.nn.ReLU(), len)
    assert not found(synced, ranks=1)
    for told in (found(synced), found(linear, torch.nn.Sequential(synced)), found(linear, LayerSpec(type(synced), 2))):
        (problem,) = told
        assert "a layer SyncBatchNorm" in problem and "use BatchNorm" in problem
    for told in (found(Experts(linear)), found(linear, LayerSpec(MoE, 2, linear))):
        (problem,) = told
        assert "of deepspeed.moe." in problem and "without the plugin" in problem


def test_layers_that_torch_jit_has_compiled_are_named_with_what_to_do() -> None:
    linear = torch.nn.Linear(2, 2)
    stage = torch.nn.ModuleDict({"3": linear, "4": torch.nn.Sequential(linear, torch.nn.ReLU())})
    stage["loss_fn"] = torch.jit.script(torch.nn.MSELoss())
    assert not list(scripted_layers(stage)), "the loss function is the script's own everywhere"
    stage["4"] = torch.nn.Sequential(linear, torch.nn.Sequential(torch.jit.script(torch.nn.Linear(2, 2))))
    stage["5"] = torch.jit.script(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    inner, whole = scripted_layers(stage)
    assert inner.startswith("1.0 of layer 4 is a module that torch.jit has compiled") and "torch.compile" in inner
    assert whole.startswith("layer 5 is a module that torch.jit has compiled")


def _speaker(me: str) -> Any:
    return SimpleNamespace(me=me, session=SimpleNamespace(worker=me))


def test_modules_with_weights_beside_the_layers_are_refused_and_others_are_not() -> None:
    root = torch.nn.Module()
    root.add_module("0", torch.nn.Linear(2, 2))
    root.add_module("tied_modules", torch.nn.ModuleDict({"embed": torch.nn.Linear(2, 2)}))
    root.add_module("loss_fn", torch.nn.Linear(2, 2))
    root.add_module("activation", torch.nn.GELU())
    root.register_parameter("temperature", torch.nn.Parameter(torch.ones(1)))
    assert not list(modules_of_its_own(root))
    root.add_module("extra", torch.nn.Linear(2, 2))
    root.add_module("statistics", torch.nn.BatchNorm1d(2, affine=False))
    first, second = modules_of_its_own(root)
    assert "'extra' (a Linear)" in first and "'statistics' (a BatchNorm1d)" in second
