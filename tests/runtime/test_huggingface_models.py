"""Models of transformers as pipelines: equal through losses, saved in the library's layout by whoever owns what."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.pipe import PipelineModule
from torch import Tensor

from deepspeed_bamboo.models.huggingface import Decoder
from tests.models.test_huggingface import FAMILIES, config_of
from tests.models.test_references import library
from tests.models.whole import Whole
from tests.runtime.jobs import Jobs
from tests.runtime.scenarios import Training, build_module
from tests.runtime.test_losses import kill

STEPS = 3
MICRO_BATCHES = 2
NO_DROPOUT = {"gpt2": {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}}


def batches(*, first: int = 0, masked: bool) -> Iterator[Any]:
    """Micro-batches for a causal language model; ``masked``: with padding on the left."""
    number = first
    while True:
        tokens = torch.randint(3, 61, (2, 9), generator=torch.Generator().manual_seed(number))
        if masked:
            mask = torch.ones_like(tokens)
            mask[0, : 1 + number % 4] = 0
            yield (tokens, mask), tokens.masked_fill(mask == 0, -100)
        else:
            yield tokens, tokens
        number += 1


def train(
    training: Training, model: str, save: str, *, adapter: bool, masked: bool, small: bool = False
) -> dict[str, Any]:
    """Train what is in the folder ``model``; losses and digest, and the weights in folder ``save``.

    ``small``: weights are read as bf16, activations are computed again, and stages have as many parameters.
    """
    decoder = Decoder.from_pretrained(model, dtype=torch.bfloat16 if small else torch.float32)
    given = adapter_config() if adapter else None

    def make_module() -> PipelineModule:
        options = {"loss_fn": decoder.loss, "num_stages": training.stages, "partition_method": "type:DecoderLayer"}
        if small:
            options |= {"partition_method": "parameters", "activation_checkpoint_interval": 1}
            options["checkpointable_layers"] = ["DecoderLayer"]
        module = PipelineModule(layers=decoder.layers(), **options)
        if given is not None:
            library("peft").inject_adapter_in_model(given, module)
        return module

    engine = build_module(training, make_module)
    if hasattr(engine, "set_data_source"):
        engine.set_data_source(lambda _, step: batches(first=step * MICRO_BATCHES, masked=masked))
    data = batches(masked=masked)
    result: dict[str, Any] = {"losses": [float(engine.train_batch(data)) for _ in range(training.steps)]}
    if given is not None:
        decoder.save_adapter(engine, save, given)
    else:
        decoder.save_pretrained(engine, save)
    if training.faults is not None:
        result["digest"] = engine.state_digest()
        engine.close()
    return result


def adapter_config() -> Any:
    return library("peft").LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "down_proj"], lora_dropout=0.0)


def compare(folder: str, model: str, trainings: list[Training], **options: bool) -> dict[str, Any]:
    """Several runs in these processes, by name; each saves into a folder of its name."""
    return {one.name: train(one, model, f"{folder}/{one.name}", **options) for one in trainings}


def runs(family: str, *, stages: int, faults: list[dict[str, Any]]) -> list[Training]:
    # No Adam: its first steps make much of the last bits, in which the library's own run differs.
    settings = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    common: dict[str, Any] = {"stages": stages, "steps": STEPS, "micro_batches": MICRO_BATCHES, "settings": settings}
    return [
        Training(f"{family}-stock", **common),
        Training(f"{family}-calm", **common, faults=[]),
        Training(f"{family}-killed", **common, faults=faults),
    ]


def saved(family: str, folder: Path, **changes: Any) -> Path:
    """A model with random weights, as the library saves it."""
    torch.manual_seed(4)
    model = library("transformers").AutoModelForCausalLM.from_config(config_of(family, **changes))
    model.save_pretrained(folder)
    return folder


def losses_of_the_library(model: Any, *, masked: bool) -> list[float]:
    """What the library's own model gives in one process."""
    optimizer, data, losses = torch.optim.SGD(model.parameters(), lr=0.1), batches(masked=masked), []
    model.eval()
    for _ in range(STEPS):
        total = 0.0
        for _ in range(MICRO_BATCHES):
            given, labels = next(data)
            tokens, mask = given if masked else (given, None)
            loss = model(input_ids=tokens, attention_mask=mask, labels=labels, use_cache=False).loss / MICRO_BATCHES
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def assert_alike(result: Any, folder: Path, family: str) -> None:
    """Stock, undisturbed and killed: losses and saved weights bitwise equal; digests of the plugin's."""
    names = [f"{family}-{kind}" for kind in ("stock", "calm", "killed")]
    assert [result.common(name)["losses"] for name in names[1:]] == [result.common(names[0])["losses"]] * 2
    assert result.common(names[1])["digest"] == result.common(names[2])["digest"]
    assert hashes(folder / names[0]) == hashes(folder / names[1]) == hashes(folder / names[2])


def hashes(folder: Path) -> dict[str, str]:
    load = library("safetensors.torch").load_file
    tensors = {name: value for path in folder.glob("*.safetensors") for name, value in load(path).items()}
    raw = {name: value.contiguous().view(-1).view(torch.uint8).numpy() for name, value in tensors.items()}
    return {name: hashlib.sha256(value.tobytes()).hexdigest() for name, value in sorted(raw.items())}


def assert_saved_for_the_library(folder: Path, losses: list[float], original: Path, *, masked: bool) -> None:
    """The library reads what was saved, and gives the logits of the pieces; it would have had the same losses."""
    load = library("transformers").AutoModelForCausalLM.from_pretrained
    theirs, ours = load(folder).eval(), Whole(Decoder.from_pretrained(folder).layers()).eval()
    tokens = next(batches(first=50, masked=False))[0]
    with torch.no_grad():
        logits: Tensor = theirs(tokens).logits
        torch.testing.assert_close(ours(tokens), logits, rtol=1e-5, atol=1e-6)
        assert not torch.equal(load(original)(tokens).logits, logits), "nothing was trained"
    expected = losses_of_the_library(load(original), masked=masked)
    assert losses == pytest.approx(expected, abs=1e-5)


def test_a_decoder_is_trained_and_saved_through_the_loss_of_its_last_stage(jobs: Jobs, tmp_path: Path) -> None:
    model = saved("gpt2", tmp_path / "model", **NO_DROPOUT["gpt2"])
    (*_, killed) = runs("gpt2", stages=2, faults=[kill(1, 0, 1, "backward", 1)])
    options = {"folder": str(tmp_path), "model": str(model), "adapter": False, "masked": True}
    result = jobs.run(compare, world=2, trainings=[killed], **options)
    assert result.survivors == [0], result.transcript()
    index = json.loads((tmp_path / "gpt2-killed" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == 2, "one file for each stage, whoever owns it"
    losses = result.common("gpt2-killed")["losses"]
    assert_saved_for_the_library(tmp_path / "gpt2-killed", losses, model, masked=True)


@pytest.mark.sweep
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_any_stage_of_any_family_is_lost(jobs: Jobs, tmp_path: Path, family: str, stage: int) -> None:
    masked = stage == 1
    model = saved(family, tmp_path / "model", **NO_DROPOUT.get(family, {}))
    trainings = runs(family, stages=3, faults=[kill(1, 0, stage, "backward", 1)])
    result = jobs.run(
        compare, world=3, folder=str(tmp_path), model=str(model), trainings=trainings, adapter=False, masked=masked
    )
    assert result.survivors == [rank for rank in range(3) if rank != stage], result.transcript()
    assert_alike(result, tmp_path, family)
    losses = result.common(f"{family}-killed")["losses"]
    assert_saved_for_the_library(tmp_path / f"{family}-killed", losses, model, masked=masked)


@pytest.mark.sweep
def test_an_adapter_of_peft_is_trained_and_saved_through_a_loss(jobs: Jobs, tmp_path: Path) -> None:
    peft = library("peft")
    model = saved("llama", tmp_path / "model")
    trainings = runs("llama", stages=2, faults=[kill(1, 0, 0, "backward", 1)])
    result = jobs.run(
        compare, world=2, folder=str(tmp_path), model=str(model), trainings=trainings, adapter=True, masked=False
    )
    assert result.survivors == [1], result.transcript()
    assert_alike(result, tmp_path, "llama")
    base = library("transformers").AutoModelForCausalLM.from_pretrained(model)
    whole = peft.PeftModel.from_pretrained(base, tmp_path / "llama-killed")
    grown = {name: value for name, value in whole.named_parameters() if "lora_B" in name}
    assert len(grown) == 6 and all(value.abs().max() > 0 for value in grown.values())


@pytest.mark.sweep
@pytest.mark.parametrize("stage", [0, 2])
def test_weights_read_as_bf16_and_activations_computed_again_survive_a_loss(
    jobs: Jobs, tmp_path: Path, stage: int
) -> None:
    model = saved("qwen2", tmp_path / "model", tie_word_embeddings=True)
    trainings = [
        dataclasses.replace(one, settings={**one.settings, "bf16": {"enabled": True}})
        for one in runs("qwen2", stages=3, faults=[kill(1, 0, stage, "backward", 1)])
    ]
    options = {"folder": str(tmp_path), "model": str(model), "adapter": False, "masked": True, "small": True}
    result = jobs.run(compare, world=3, trainings=trainings, **options)
    assert result.survivors == [rank for rank in range(3) if rank != stage], result.transcript()
    assert_alike(result, tmp_path, "qwen2")
