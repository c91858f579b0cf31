"""The models: weights from the seed alone, nothing drawn without dropout, no look into the future."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from deepspeed.pipe import TiedLayerSpec
from torch import Tensor, nn

from deepspeed_bamboo.models.sizes import MODEL_SIZES, ModelSize
from deepspeed_bamboo.models.transformer import model_size, token_loss, transformer_layers

TINY = MODEL_SIZES["gpt2-tiny"]
FUSED = ModelSize(
    "fused", layers=2, width=32, heads=4, sequence_length=16, vocabulary=256, causal=True, fused_attention=True
)


def build(size: ModelSize, **settings: Any) -> nn.Sequential:
    """All layers in one process, as a pipeline of one stage has them."""
    return nn.Sequential(*(spec.build() for spec in transformer_layers(size, **settings)))


def tokens(size: ModelSize, *, seed: int = 0) -> Tensor:
    return torch.randint(256, (2, size.sequence_length), generator=torch.Generator().manual_seed(seed))


def same_weights(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def test_weights_depend_on_the_seed_alone() -> None:
    torch.manual_seed(1)
    one = build(TINY, seed=5)
    torch.manual_seed(2)
    assert same_weights(one, build(TINY, seed=5))
    assert not same_weights(one, build(TINY, seed=6))


def test_every_layer_has_weights_of_its_own() -> None:
    model = build(TINY)
    drawn = [weight for weight in model.state_dict().values() if weight.dim() == 2]
    corners = {tuple(weight.flatten()[:4].tolist()) for weight in drawn}
    assert len(corners) == len(drawn)


def test_building_and_running_leaves_torchs_generator_alone() -> None:
    before = torch.get_rng_state()
    model = build(TINY).train()
    token_loss(model(tokens(TINY)), tokens(TINY)).backward()
    assert torch.equal(torch.get_rng_state(), before)


def test_dropout_draws_from_torchs_generator_and_only_in_training() -> None:
    model = build(TINY, dropout=0.5)
    torch.manual_seed(3)
    one = model(tokens(TINY))
    torch.manual_seed(3)
    assert torch.equal(one, model(tokens(TINY)))
    assert not torch.equal(one, model(tokens(TINY)))
    before = torch.get_rng_state()
    model.eval()(tokens(TINY))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("size", [TINY, FUSED])
def test_a_causal_model_sees_only_what_came_before(size: ModelSize) -> None:
    model = build(size)
    original = tokens(size)
    changed = original.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 256
    one, other = model(original), model(changed)
    assert torch.equal(one[:, :9], other[:, :9])
    assert not torch.allclose(one[:, 9:], other[:, 9:])


def test_plain_and_fused_attention_compute_the_same() -> None:
    plain = ModelSize("plain", layers=2, width=32, heads=4, sequence_length=16, vocabulary=256)
    torch.testing.assert_close(build(FUSED)(tokens(FUSED)), build(plain)(tokens(plain)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_bitwise_reproducible(dtype: torch.dtype) -> None:
    def gradients() -> list[Tensor]:
        model = build(TINY, seed=7).to(dtype)
        token_loss(model(tokens(TINY)), tokens(TINY, seed=1)).backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    one, other = gradients(), gradients()
    assert len(one) == len(list(build(TINY).parameters()))
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_an_untrained_model_knows_nothing() -> None:
    loss = token_loss(build(TINY)(tokens(TINY)), tokens(TINY, seed=1))
    assert abs(loss.item() - math.log(256)) < 0.1


def test_positions_marked_in_the_labels_are_not_asked() -> None:
    logits = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([[1, 2, -100], [-100, -100, 3]])
    alone = [logits[0, 0], logits[0, 1], logits[1, 2]]
    expected = sum(-row.log_softmax(0)[label] for row, label in zip(alone, (1, 2, 3), strict=True)) / 3
    torch.testing.assert_close(token_loss(logits, labels), expected)


def test_a_tied_model_names_its_embedding_as_head() -> None:
    specs = transformer_layers(TINY, tied=True)
    tied = [spec for spec in specs if isinstance(spec, TiedLayerSpec)]
    assert [specs.index(spec) for spec in tied] == [0, len(specs) - 1]
    assert tied[0].key == tied[1].key
    embedding = tied[0].build()
    assert same_weights(embedding, tied[1].build())
    hidden = torch.randn(2, 3, TINY.width)
    assert torch.equal(tied[1].forward_fn(embedding, hidden), hidden @ embedding.weight.T)


def test_wrong_names_and_values_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'gpt3'.*gpt2-tiny"):
        model_size("gpt3")
    with pytest.raises(ValueError, match=r"dropout 1\.0"):
        transformer_layers(TINY, dropout=1.0)
    with pytest.raises(ValueError, match="bert-tiny is no causal model"):
        transformer_layers(MODEL_SIZES["bert-tiny"])
    with pytest.raises(ValueError, match="width 10"):
        ModelSize("odd", layers=1, width=10, heads=4, sequence_length=8, vocabulary=256)
