"""What scripts do around training: losses that are methods of the module, exports of their own, monitors, engines."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.pipe import PipelineModule

from deepspeed_bamboo.runtime.checkpoint.stage_files import wrong_stages
from deepspeed_bamboo.runtime.main import EXIT_JOB_FAILED, EXIT_USER_ERROR
from deepspeed_bamboo.runtime.stock.patches.tied_weights import _saved_name
from deepspeed_bamboo.runtime.stock.rebinding import rebound
from deepspeed_bamboo.runtime.stock.several_ranks import SeveralRanks, as_rank
from tests.runtime import models
from tests.runtime.jobs import Jobs
from tests.runtime.scenarios import Training, build
from tests.runtime.test_losses import kill


class OwnLoss(PipelineModule):
    """Its loss is a method of its own, which keeps the last value for ``get_additional_losses``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.seen = torch.zeros(())
        super().__init__(*args, **{**kwargs, "loss_fn": self.own_loss})

    def own_loss(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.seen = outputs.detach().abs().mean()
        return models.squared_error(outputs, labels)

    def get_additional_losses(self) -> OrderedDict[str, torch.Tensor]:
        return OrderedDict(size=self.seen)


def digest(named: dict[str, torch.Tensor]) -> dict[str, str]:
    return {name: hashlib.sha256(value.detach().numpy().tobytes()).hexdigest()[:12] for name, value in named.items()}


def train_with_habits(training: Training, folder: str) -> dict[str, Any]:
    monitor = {"enabled": True, "output_path": folder, "job_name": "rows"}
    training = dataclasses.replace(training, settings={**training.settings, "csv_monitor": monitor})
    engine = build(training, module_class=OwnLoss)
    module = engine.module
    data = models.micro_batches(models.vectors, pipeline=0, first_step=0, count=training.micro_batches)
    losses, sizes = [], []
    for _ in range(training.steps):
        losses.append(float(engine.train_batch(data)))
        sizes.append(float(engine.get_additional_losses()["size"]))
        if engine.monitor.enabled:
            engine.monitor.write_events([("Own/size", sizes[-1], engine.global_samples)])
    result = {"losses": losses, "sizes": sizes, "own": digest(dict(module.named_parameters()))}
    assert list(module.state_dict()) == [name for name, _ in module.named_parameters()]
    saved: list[dict[str, str]] = []
    saver = threading.Thread(target=lambda: saved.append(digest(engine.module.state_dict())))
    saver.start()
    saver.join()
    assert saved == [result["own"]], "a thread that saves sees what the script sees"
    if training.faults is not None:
        hosted = engine.hosted_modules()
        assert sum(len(list(part.parameters())) for part in module.children()) <= len(result["own"])
        assert result["own"].keys() == {n for part in hosted for n in _names(engine, part)}
        whole = engine.whole_state_dict()
        assert bool(whole) == engine.is_reporter
        result["whole"] = digest(whole)
        engine.close()
    return result


def _names(engine: Any, coordinate: Any) -> list[str]:
    first, stop = engine.module.parts[coordinate.stage : coordinate.stage + 2]
    return [f"{index}.linear.{kind}" for index in range(first, stop) for kind in ("weight", "bias")]


def test_losses_exports_and_monitors_are_whole_after_the_ends_were_lost(jobs: Jobs, tmp_path: Path) -> None:
    case = Training("habits", 4, count=8, steps=4)
    plain = jobs.run(train_with_habits, world=4, training=case, folder=str(tmp_path / "stock"))
    faults = [kill(1, 0, 3, "backward", 1), kill(2, 0, 0, "step")]
    killed = dataclasses.replace(case, name="habits-killed", faults=faults)
    result = jobs.run(train_with_habits, world=4, training=killed, folder=str(tmp_path / "own"))
    assert result.survivors == [1, 2], result.transcript()
    assert result.common("losses") == plain.common("losses")
    assert result.common("sizes") == plain.common("sizes"), "kept by the module of the stage that computed"
    everything = {name: value for rank in range(4) for name, value in plain.values[rank]["own"].items()}
    exported = {name: value for rank in (1, 2) for name, value in result.values[rank]["own"].items()}
    assert exported == everything, "the script's module shows all that its worker hosts"
    assert [whole for rank in (1, 2) if (whole := result.values[rank]["whole"])] == [everything]
    assert "state_dict() have the weights of" in result.transcript()
    told = [rank for rank in (1, 2) if "this worker stands for rank 0 from now on" in result.outputs[rank]]
    assert [bool(result.values[rank]["whole"]) for rank in told] == [True], "on its new reporter alone"
    for name in ("Train_Samples_lr", "Train_Samples_train_loss", "Own_size"):
        file = f"rows/{name}.csv"
        rows = (tmp_path / "own" / file).read_text().splitlines()
        assert rows == (tmp_path / "stock" / file).read_text().splitlines(), f"{name}: one row a step"


def test_another_engine_is_refused_on_all_ranks_or_warned_of(jobs: Jobs) -> None:
    """As in a worker under the launch module, whose agent says what is wanted."""
    result = jobs.run(make_stock_engine, world=2, wanted="refuse")
    assert set(result.codes) <= {EXIT_USER_ERROR, EXIT_JOB_FAILED} and result.survivors == [], result.transcript()
    assert "which is not the plugin's engine" in result.transcript() and "other_engines" in result.transcript()
    result = jobs.run(make_stock_engine, world=2, wanted="warn")
    assert result.survivors == [0, 1], result.transcript()
    assert "which is not the plugin's engine" in result.outputs[0]
    assert "nothing in it was protected" in result.outputs[0]


def make_stock_engine(wanted: str) -> str:
    os.environ["BAMBOO_OTHER_ENGINES"] = wanted
    build(Training("other", 2, faults=None))
    return "made"


def test_a_lone_worker_is_told_that_nobody_stands_in_for_it(jobs: Jobs) -> None:
    result = jobs.run(train_alone, world=1)
    assert result.survivors == [0], result.transcript()
    assert "nobody can stand in for it" in result.outputs[0]


@pytest.mark.sweep
def test_workers_without_redundancy_are_told_that_no_loss_is_survived(jobs: Jobs) -> None:
    result = jobs.run(build_unprotected, world=2)
    assert "redundancy.mode is off, so nobody can stand in for any worker" in result.transcript()
    assert "begins at the first step, since checkpoint.dir is not set" in result.transcript()


def build_unprotected() -> str:
    build(Training("unprotected", 2, bamboo={"redundancy": {"mode": "off"}}, faults=[])).close()
    return "done"


def train_alone() -> str:
    build(Training("alone", 1, faults=[])).close()
    return "done"


def test_what_a_module_keeps_of_itself_becomes_the_replicas() -> None:
    from functools import partial

    from deepspeed.pipe import LayerSpec

    class Owner(torch.nn.Module):
        def method(self) -> Owner:
            return self

    old, new = Owner(), Owner()

    def inside() -> Owner:
        return old

    swap = partial(rebound, old=old, new=new)
    assert swap(old.method)() is new and swap(inside)() is new and swap(partial(Owner.method, old))() is new
    assert swap([1, {"key": old.method}])[1]["key"]() is new
    spec = LayerSpec(torch.nn.Linear, 2, old.method)
    assert swap(spec).module_args[1]() is new and spec.module_args[1]() is old
    untouched = [1, (2, {"a": len}), partial(max, 1), LayerSpec(torch.nn.Linear, 2, 2), lambda: 3]
    assert swap(untouched) is untouched


def test_a_worker_that_stands_for_several_ranks_is_equal_to_each() -> None:
    rank = as_rank([0, 3])
    assert rank == 0 and rank == 3 and (rank != 3) is False and rank != 1 and f"{rank}" == "0"
    assert rank in [3] and [3, 7].index(rank) == 0 and isinstance(rank, SeveralRanks)
    assert type(as_rank([2])) is int


def test_which_stage_a_checkpoint_lacks_or_of_how_many_it_is(tmp_path: Path) -> None:
    def saved(*stages: int) -> Path:
        folder = tmp_path / "-".join(map(str, stages))
        folder.mkdir()
        for stage in stages:
            (folder / f"mp_rank_{stage:02d}_model_states.pt").touch()
        return folder

    assert wrong_stages(saved(0, 1, 2), stages=3) is None
    assert "lacks files of stage 1 of 3" in str(wrong_stages(saved(0, 2), stages=3))
    assert "saved by a job of 2 stages, and this one has 4" in str(wrong_stages(saved(0, 1), stages=4))


def test_a_tied_attribute_that_is_a_property_is_found_in_a_state_dict() -> None:
    class Table(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Embedding(2, 3)

        @property
        def words(self) -> torch.nn.Parameter:
            return self.inner.weight

    table = Table()
    assert _saved_name(table, table.words, "words") == "inner.weight"
    assert _saved_name(table, torch.zeros(1), "other") == "other"


@pytest.mark.parametrize("case", ["axes", "model"])
def test_a_topology_of_another_order_or_with_tensor_parallelism_is_refused(jobs: Jobs, case: str) -> None:
    result = jobs.run(build_with_topology, world=4 if case == "axes" else 2, case=case)
    assert result.survivors == [] and set(result.codes) <= {EXIT_USER_ERROR, EXIT_JOB_FAILED}, result.transcript()
    wanted = 'put "pipe" before "data"' if case == "axes" else "tensor parallelism is not supported"
    assert wanted in result.transcript()


def build_with_topology(case: str) -> None:
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology, ProcessTopology

    if case == "axes":
        topology: Any = ProcessTopology(axes=["data", "pipe"], dims=[2, 2])
    else:
        topology = PipeModelDataParallelTopology(num_pp=1, num_mp=2, num_dp=1)
    build(Training(f"topology-{case}", 2, module={"topology": topology, "num_stages": None}, faults=[]))


def train_with_model_axis() -> dict[str, Any]:
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    topology = PipeModelDataParallelTopology(num_pp=3, num_mp=1, num_dp=1)
    module = {"topology": topology, "num_stages": None}
    training = Training("model-axis", 3, module=module, faults=[kill(1, 0, 1, "backward", 1)])
    engine = build(training)
    data = models.micro_batches(models.vectors, pipeline=0, first_step=0, count=4)
    losses = [float(engine.train_batch(data)) for _ in range(3)]
    engine.close()
    return {"losses": losses}


def test_a_topology_with_a_model_axis_of_one_is_a_pipeline(jobs: Jobs) -> None:
    from tests.runtime.scenarios import train

    plain = jobs.run(train, world=3, training=Training("no-model-axis", 3))
    result = jobs.run(train_with_model_axis, world=3)
    assert result.survivors == [0, 2], result.transcript()
    assert result.common("losses") == plain.common("losses")
