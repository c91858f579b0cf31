"""Pieces of the library's models, one after the other, compute what the library's whole model does."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from deepspeed_bamboo.errors import ConfigError
from deepspeed_bamboo.models.huggingface import Decoder
from deepspeed_bamboo.models.huggingface.saving import save_adapter, save_weights
from tests.models.test_references import library
from tests.models.whole import Whole

SIZE = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 61}
LLAMA = {**SIZE, "intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": 64}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "qwen2": {**LLAMA, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    "mistral": {**LLAMA, "sliding_window": 5},
    "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": 61, "n_positions": 64},
    "gemma": {**LLAMA, "head_dim": 8},
}


def config_of(family: str, **changes: Any) -> Any:
    options = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **FAMILIES[family], **changes}
    return library("transformers").AutoConfig.for_model(family, **options)


def whole_of(config: Any, folder: Path, *, attention: str | None = None) -> tuple[Any, Any, Decoder]:
    """The library's own model with random weights, saved into ``folder``; and the pieces read from there."""
    torch.manual_seed(4)
    theirs = library("transformers").AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    theirs.save_pretrained(folder)
    decoder = Decoder.from_pretrained(folder, attention=attention)
    return theirs, Whole(decoder.layers()), decoder


def some_tokens(*, batch: int = 2, length: int = 9) -> Tensor:
    return torch.randint(3, 61, (batch, length), generator=torch.Generator().manual_seed(7))


def by_library_names(pieces: Whole) -> dict[str, torch.nn.Parameter]:
    named = dict(pieces.named_parameters())
    return {name.partition(".parts.")[2].replace("/", "."): parameter for name, parameter in named.items()}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_the_librarys(family: str, attention: str, tmp_path: Path) -> None:
    config = config_of(family, **{"tie_word_embeddings": True} if family == "qwen2" else {})
    theirs, ours, decoder = whole_of(config, tmp_path, attention=attention)
    tokens = some_tokens()
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0  # padded on the left
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    labels = tokens.masked_fill(mask == 0, -100)
    theirs.eval()
    ours.eval()
    for given, options in [
        (tokens, {}),
        ((tokens, mask), {"attention_mask": mask}),
        ((tokens, mask, positions), {"attention_mask": mask, "position_ids": positions}),
    ]:
        theirs.zero_grad()
        ours.zero_grad()
        expected = theirs(input_ids=tokens, labels=labels, use_cache=False, **options)
        expected.loss.backward()
        logits = ours(given)
        loss = decoder.loss(logits, labels)
        loss.backward()
        asked = mask.bool()
        torch.testing.assert_close(logits[asked], expected.logits[asked], rtol=1e-5, atol=1e-6)
        assert abs(loss.item() - expected.loss.item()) < 1e-5
        wanted, own = dict(theirs.named_parameters()), by_library_names(ours)
        assert own.keys() == wanted.keys()
        for name, parameter in own.items():
            torch.testing.assert_close(parameter.grad, wanted[name].grad, rtol=1e-4, atol=1e-6, msg=name)


def test_masks_and_rotary_embeddings_are_computed_once_for_the_layers_of_a_stage(tmp_path: Path) -> None:
    _, ours, decoder = whole_of(config_of("llama"), tmp_path)
    runs = []
    run = decoder.skeleton._run
    ours.layers[1].skeleton._run = lambda *given, **options: (runs.append(given), run(*given, **options))[1]
    tokens, mask = some_tokens(), torch.ones(2, 9, dtype=torch.int64)
    mask[0, :2] = 0
    ours((tokens, mask))
    assert len(runs) == 2, "for all layers, and for the norm"
    first = ours((tokens, mask))
    mask[0, :4] = 0
    second = ours((tokens, mask))
    assert len(runs) == 5 and not torch.equal(first[0, 4:], second[0, 4:]), "a mask that was changed is another mask"
    ours(tokens)
    ours(some_tokens(batch=1))
    assert len(runs) == 9


def test_new_weights_depend_on_seed_and_place_alone_and_are_the_librarys_kind() -> None:
    config = config_of("gpt2")
    before = torch.random.get_rng_state()
    first, same, other = (Whole(Decoder.from_config(config, seed=seed).layers()).state_dict() for seed in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(first[name], same[name]) for name in first)
    drawn = [name for name in first if name.endswith("c_attn.weight")]
    assert len(drawn) == 3 and not any(torch.equal(first[name], other[name]) for name in drawn)
    assert 0.015 < first[drawn[0]].std() < 0.025, "config.initializer_range"
    assert all(torch.isfinite(value).all() for value in first.values())


def test_models_that_are_no_chain_and_folders_without_their_weights_are_refused(tmp_path: Path) -> None:
    for family, changes, wanted in [
        ("bert", {**SIZE, "intermediate_size": 8}, "weights outside of its decoder layers"),
        ("gemma3n_text", {}, "can't be computed layer by layer"),
    ]:
        config = library("transformers").AutoConfig.for_model(family, **changes)
        with pytest.raises(ConfigError, match=wanted):
            Decoder.from_config(config)
    with pytest.raises(ConfigError, match=r"neither model\.safetensors nor"):
        config_of("llama").save_pretrained(tmp_path)
        Decoder.from_pretrained(tmp_path)
    whole_of(config_of("llama"), tmp_path)
    config_of("llama", intermediate_size=40).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="where LlamaForCausalLM wants"):
        Whole(Decoder.from_pretrained(tmp_path).layers())
    config_of("llama", attention_bias=True).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"no weights called model\.layers\.0\.self_attn"):
        Whole(Decoder.from_pretrained(tmp_path).layers())


def test_what_is_no_folder_and_what_is_no_decoder_is_said_shortly() -> None:
    with pytest.raises(ConfigError, match=r"there is no folder '\./absent'"):
        Decoder.from_pretrained("./absent")
    with pytest.raises(ConfigError, match="a t5 model is no causal language model"):
        Decoder.from_config(library("transformers").T5Config())


def test_nothing_is_written_for_a_step_that_the_job_did_before(tmp_path: Path) -> None:
    behind = SimpleNamespace(is_behind=True)
    save_weights(behind, tmp_path / "whole", config=None)
    save_adapter(behind, tmp_path / "adapter", adapter=None)
    assert not list(tmp_path.iterdir())
