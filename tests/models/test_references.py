"""The same weights give the outputs of the libraries that have these models: torchvision, transformers, torch."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepspeed_bamboo.models.bert import bert_layers
from deepspeed_bamboo.models.gnmt import GNMT_TINY, BothWays, gnmt_layers
from deepspeed_bamboo.models.resnet import RESNET152, Bottleneck, resnet_layers
from deepspeed_bamboo.models.sizes import MODEL_SIZES, ModelSize
from deepspeed_bamboo.models.transformer import transformer_layers
from deepspeed_bamboo.models.vision import ALEXNET, VGG19, alexnet_layers, vgg_layers
from tests.models.whole import Whole

SMALL = {"layers": 3, "width": 48, "heads": 4, "sequence_length": 24, "vocabulary": 71}


def library(name: str) -> Any:
    """The module ``name``; skips the test where it can't be imported."""
    try:
        return importlib.import_module(name)
    except (ImportError, RuntimeError, AttributeError) as error:
        pytest.skip(f"{name} can't be imported here: {error}")


def assert_equal(ours: Tensor, theirs: Tensor) -> None:
    assert theirs.abs().max() > 1e-3
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def copy(target: nn.Module, source: nn.Module) -> None:
    """The weights and buffers of ``source`` in the order in which both have them."""
    ours, theirs = target.state_dict(), source.state_dict()
    assert [value.shape for value in ours.values()] == [value.shape for value in theirs.values()]
    target.load_state_dict(dict(zip(ours, theirs.values(), strict=True)))


def images(count: int = 2, *, size: int = 224) -> Tensor:
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(("name", "layers"), [("vgg19", vgg_layers(VGG19)), ("alexnet", alexnet_layers(ALEXNET))])
def test_vgg_and_alexnet_are_torchvisions(name: str, layers: list[Any]) -> None:
    theirs = getattr(library("torchvision.models"), name)()
    ours = Whole(layers)
    copy(ours, theirs)
    with torch.no_grad():
        assert_equal(ours.eval()(images()), theirs.eval()(images()))


def test_resnet_is_torchvisions_with_its_running_statistics() -> None:
    theirs = library("torchvision.models").resnet152()
    ours = Whole(resnet_layers(RESNET152))
    stem, *blocks, head = ours.layers
    for target, source in ((stem.convolution, theirs.conv1), (stem.norm, theirs.bn1), (head.linear, theirs.fc)):
        copy(target, source)
    their_blocks = [block for layer in (theirs.layer1, theirs.layer2, theirs.layer3, theirs.layer4) for block in layer]
    for block, other in zip(blocks, their_blocks, strict=True):
        copy_bottleneck(block, other)
    with torch.no_grad():
        for _ in range(2):  # in training the statistics move
            assert_equal(ours.train()(images(size=64)), theirs.train()(images(size=64)))
        assert_equal(blocks[-1].widen_norm.running_var, their_blocks[-1].bn3.running_var)
        assert_equal(ours.eval()(images()), theirs.eval()(images()))


def copy_bottleneck(block: Bottleneck, other: Any) -> None:
    for one, convolution in (("reduce", "conv1"), ("middle", "conv2"), ("widen", "conv3")):
        copy(getattr(block, one), getattr(other, convolution))
        copy(getattr(block, f"{one}_norm"), getattr(other, convolution.replace("conv", "bn")))
    assert isinstance(block.shortcut, nn.Identity) is (other.downsample is None)
    if other.downsample is not None:
        copy(block.shortcut, other.downsample)


@pytest.mark.parametrize("fused", [False, True])
def test_gpt2_is_that_of_transformers(fused: bool) -> None:
    transformers = library("transformers")
    size = dataclasses.replace(MODEL_SIZES["gpt2-small"], **SMALL, fused_attention=fused)
    shape = {"n_layer": size.layers, "n_embd": size.width, "n_head": size.heads}
    lengths = {"n_positions": size.sequence_length, "vocab_size": size.vocabulary}
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape, **lengths)).eval()
    ours = Whole(transformer_layers(size)).eval()
    words, places, *blocks, norm, head = ours.layers
    assert head is words
    words.weight.data.copy_(theirs.transformer.wte.weight)
    places.weight.data.copy_(theirs.transformer.wpe.weight)
    for block, other in zip(blocks, theirs.transformer.h, strict=True):
        copy(block.attention_norm, other.ln_1)
        copy(block.network_norm, other.ln_2)
        pairs = [(block.attention.into, other.attn.c_attn), (block.attention.out, other.attn.c_proj)]
        for target, source in [*pairs, (block.widen, other.mlp.c_fc), (block.narrow, other.mlp.c_proj)]:
            target.weight.data.copy_(source.weight.T)
            target.bias.data.copy_(source.bias)
    copy(norm, theirs.transformer.ln_f)
    tokens = random_tokens(size)
    with torch.no_grad():
        assert_equal(ours(tokens), theirs(tokens).logits)


@pytest.mark.parametrize("fused", [False, True])
def test_bert_is_that_of_transformers(fused: bool) -> None:
    transformers = library("transformers")
    size = dataclasses.replace(MODEL_SIZES["bert-large"], **SMALL, fused_attention=fused)
    config = transformers.BertConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.width,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        intermediate_size=4 * size.width,
        max_position_embeddings=size.sequence_length,
    )
    theirs = transformers.BertForPreTraining(config).eval()
    ours = Whole(bert_layers(size)).eval()
    copy_bert(ours, theirs)
    tokens, segments = random_tokens(size), (torch.arange(size.sequence_length) > 9).long().expand(2, -1)
    with torch.no_grad():
        expected = theirs(tokens, token_type_ids=segments)
        scores, follows = ours((tokens, segments))
    assert_equal(scores, expected.prediction_logits)
    assert_equal(follows, expected.seq_relationship_logits)


def copy_bert(ours: Whole, theirs: Any) -> None:
    words, places, *blocks, head, last = ours.layers
    assert last is words
    embeddings, predictions = theirs.bert.embeddings, theirs.cls.predictions
    words.weight.data.copy_(embeddings.word_embeddings.weight)
    places.position.data.copy_(embeddings.position_embeddings.weight)
    places.segment.data.copy_(embeddings.token_type_embeddings.weight)
    copy(places.norm, embeddings.LayerNorm)
    for block, other in zip(blocks, theirs.bert.encoder.layer, strict=True):
        attention = [getattr(other.attention.self, name) for name in ("query", "key", "value")]
        block.attention.into.weight.data.copy_(torch.cat([linear.weight for linear in attention]))
        block.attention.into.bias.data.copy_(torch.cat([linear.bias for linear in attention]))
        copy(block.attention.out, other.attention.output.dense)
        copy(block.attention_norm, other.attention.output.LayerNorm)
        copy(block.widen, other.intermediate.dense)
        copy(block.narrow, other.output.dense)
        copy(block.network_norm, other.output.LayerNorm)
    copy(head.pooler, theirs.bert.pooler.dense)
    copy(head.follows, theirs.cls.seq_relationship)
    copy(head.transform, predictions.transform.dense)
    copy(head.norm, predictions.transform.LayerNorm)
    nn.init.normal_(predictions.decoder.bias)
    head.bias.data.copy_(predictions.decoder.bias)


def random_tokens(size: ModelSize) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(size.vocabulary, (2, size.sequence_length), generator=generator)


def test_reading_both_ways_is_torchs_bidirectional_lstm_of_packed_sentences() -> None:
    ours, theirs = BothWays(8, seed=3), nn.LSTM(8, 8, batch_first=True, bidirectional=True)
    for name, parameter in theirs.named_parameters():
        source = ours.backwards if name.endswith("_reverse") else ours.forwards
        parameter.data.copy_(getattr(source, name.removesuffix("_reverse")))
    x, lengths = torch.randn(3, 7, 8, generator=torch.Generator().manual_seed(1)), torch.tensor([7, 3, 1])
    packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
    expected, _ = nn.utils.rnn.pad_packed_sequence(theirs(packed)[0], batch_first=True)
    result, same, target = ours((x, lengths, lengths))
    assert same is lengths and target is lengths
    for sentence, length in enumerate(lengths):
        assert_equal(result[sentence, :length], expected[sentence, :length])


def test_gnmt_sees_no_padding_and_no_word_that_comes_later() -> None:
    model = Whole(gnmt_layers(GNMT_TINY)).eval()
    source, target = random_sentences(GNMT_TINY.source_length), random_sentences(GNMT_TINY.target_length)
    lengths = torch.tensor([5, GNMT_TINY.source_length])
    scores = model((source, lengths, target))
    other_padding, other_end = source.clone(), target.clone()
    other_padding[0, 5:] = 7
    other_end[:, 6] = 9
    torch.testing.assert_close(model((other_padding, lengths, target)), scores)
    changed = model((source, lengths, other_end))
    assert torch.equal(changed[:, :6], scores[:, :6]) and not torch.allclose(changed[:, 6:], scores[:, 6:])


def random_sentences(length: int) -> Tensor:
    return torch.randint(4, GNMT_TINY.vocabulary, (2, length), generator=torch.Generator().manual_seed(length))
