"""What forwards keep for backwards: counted without memory as it is on a CPU, and what plans say of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from deepspeed_bamboo.cli.main import main
from deepspeed_bamboo.cli.plan_memory import estimate
from deepspeed_bamboo.doctor.subject import ModelFacts
from deepspeed_bamboo.models.catalog import model_named
from deepspeed_bamboo.models.costs import kept_bytes, layer_activations


@pytest.mark.parametrize("micro_batch", [1, 3])
def test_counted_on_meta_it_is_what_a_forward_on_the_cpu_keeps(micro_batch: int) -> None:
    model = model_named("gpt2-tiny")
    layers = model.layers()
    counted = layer_activations(layers, model.sample)
    x = torch.zeros(micro_batch, *model.sample.shape[1:], dtype=model.sample.dtype)
    measured = []
    for spec in layers:
        kept, x = kept_bytes(spec.build(), x, forward=getattr(spec, "forward_fn", None))
        measured.append(kept)
    assert sum(counted) * micro_batch == pytest.approx(sum(measured), rel=0.03)
    assert [size * micro_batch for size in counted] == pytest.approx(measured, rel=0.1)


def test_fused_attention_keeps_no_scores() -> None:
    """On a GPU a block of gpt2-medium was measured to keep 34.1 MiB of one sample in bf16, half of this."""
    model = model_named("gpt2-medium")
    block = layer_activations(model.layers(dropout=0.0)[:3], model.sample)[2]
    assert block / 2**20 == pytest.approx(2 * 34.1, rel=0.02)


def test_an_estimate_counts_parameters_gradients_moments_and_samples() -> None:
    model = ModelFacts("m", layers=4, stage_parameters=(100, 200), stage_activations=(1000, 0))
    settings = {"optimizer": {"type": "Adam"}, "train_micro_batch_size_per_gpu": 4}
    assert estimate(model, settings, pipelines=1).state == (1600, 3200)
    assert estimate(model, settings, pipelines=1).activations == (4000, 0)
    half = {**settings, "bf16": {"enabled": True}}
    assert estimate(model, half, pipelines=1).activations == (2000, 0)


def test_plan_shows_what_devices_hold_and_plans_nothing_that_they_cannot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes, config = tmp_path / "nodes.csv", tmp_path / "deepspeed.json"
    nodes.write_text("worker,node,zone\n" + "".join(f"w{i},n{i},z{i}\n" for i in range(3)), encoding="utf-8")
    config.write_text('{"optimizer": {"type": "Adam"}, "train_micro_batch_size_per_gpu": 2}', encoding="utf-8")
    common = ["plan", "--nodes", str(nodes), "--pipelines", "1", "--stages", "4", "--micro-batches", "4"]
    known = ["--config", str(config), "--model", "gpt2-tiny"]
    assert main([*common, *known, "--device-gib", "1"]) == 0
    shown = capsys.readouterr().out
    assert "worker  stages  shadows  state" in shown and shown.count(" MiB") == 4 * 3 + 1
    assert re.search(r"^all fit into 1 GiB: the fullest, w[0-2], has \d+\.\d MiB$", shown, re.MULTILINE)
    assert max(map(len, shown.splitlines())) <= 80
    needs = []
    for given in ("0.001", "0.0001"):
        assert main([*common, *known, "--device-gib", given]) == 2
        refused = capsys.readouterr().err
        assert "no placement was found that fits the devices" in refused
        needs.append(float(refused.partition("was found is ")[2].partition(";")[0]))
    assert needs[0] == needs[1], "whatever was asked for"
    assert main([*common, *known, "--device-gib", str(needs[0] + 0.01)]) == 0
    capsys.readouterr()
    assert main([*common, "--config", str(config)]) == 2
    assert "give both" in capsys.readouterr().err
