"""The models by name, each with its layers, its loss, its data and its published dropout."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from deepspeed_bamboo.models.bert import bert_layers, bert_loss
from deepspeed_bamboo.models.convolutions import class_loss
from deepspeed_bamboo.models.gnmt import GNMT16, GNMT_TINY, GnmtSize, gnmt_layers, translation_loss
from deepspeed_bamboo.models.images import ImageFolder
from deepspeed_bamboo.models.masked import BYTE_MARKS, WORDPIECE_MARKS, MaskedPairs
from deepspeed_bamboo.models.parallel import ByteVocabulary, ParallelText, Vocabulary, WordVocabulary, read_pairs
from deepspeed_bamboo.models.resnet import RESNET152, RESNET_TINY, ResNetSize, resnet_layers
from deepspeed_bamboo.models.sizes import MODEL_SIZES, ModelSize
from deepspeed_bamboo.models.synthetic import SyntheticImages, synthetic_pairs
from deepspeed_bamboo.models.text import TextWindows, as_tokens, read_text
from deepspeed_bamboo.models.tokens import TOKEN_FILES, TokenWindows, read_tokens
from deepspeed_bamboo.models.transformer import token_loss, transformer_layers
from deepspeed_bamboo.models.vision import (
    ALEXNET,
    ALEXNET_TINY,
    VGG19,
    VGG_TINY,
    AlexNetSize,
    VggSize,
    alexnet_layers,
    vgg_layers,
)
from deepspeed_bamboo.suggest import choose_from


@dataclass(frozen=True)
class DataPaths:
    """The files to train on. ``target`` and ``vocabulary`` belong to parallel text."""

    data: Path | None = None
    target: Path | None = None
    vocabulary: Path | None = None


@dataclass(frozen=True)
class Model:
    """One model: everything that a training script has to know.

    ``make_layers`` takes ``dropout`` and ``seed`` (and ``tied`` where ``can_tie``). ``open_data`` takes DataPaths and a
    seed, and raises ValueError for data that are of no use. ``sample``: an input of shape [1, ...]. ``dropout``: as
    published. ``repeated``: the names of the layers that activation checkpoints may recompute.
    """

    name: str
    make_layers: Callable[..., list[Any]]
    loss: Callable[[Any, Tensor], Tensor]
    open_data: Callable[[DataPaths, int], Dataset[Any]]
    sample: Any
    dropout: float
    repeated: tuple[str, ...]
    can_tie: bool = False

    def layers(self, *, dropout: float | None = None, tied: bool | None = None, seed: int = 0) -> list[Any]:
        """The layers for PipelineModule. None: as published. Raises ValueError for what the model does not take."""
        settings: dict[str, Any] = {"seed": seed}
        if tied is not None:
            if not self.can_tie:
                raise ValueError(f"whether {self.name} ties its head is part of the model; leave the choice out")
            settings["tied"] = tied
        if self.dropout:
            settings["dropout"] = self.dropout if dropout is None else dropout
        elif dropout and self.can_tie:
            settings["dropout"] = dropout
        elif dropout:
            raise ValueError(f"{self.name} has no dropout; leave the choice out")
        return self.make_layers(**settings)


def model_named(name: str) -> Model:
    """The model called ``name``. Raises ValueError that lists the names there are."""
    if name not in MODELS:
        raise ValueError(f"there is no model {choose_from(name, MODELS)}")
    return MODELS[name]


def _gpt2(size: ModelSize) -> Model:
    def open_data(paths: DataPaths, seed: int) -> Dataset[Any]:
        window = {"sequence_length": size.sequence_length, "seed": seed}
        if paths.data is not None and paths.data.suffix in TOKEN_FILES:
            return TokenWindows(read_tokens(paths.data), vocabulary=size.vocabulary, **window)
        return TextWindows(read_text(paths.data), **window)

    sample = torch.zeros(1, size.sequence_length, dtype=torch.int64, device="meta")
    make = partial(transformer_layers, size)
    return Model(size.name, make, token_loss, open_data, sample, size.dropout, ("Block",), can_tie=True)


def _bert(size: ModelSize) -> Model:
    def open_data(paths: DataPaths, seed: int) -> Dataset[Any]:
        window = {"sequence_length": size.sequence_length, "seed": seed}
        if paths.data is not None and paths.data.suffix in TOKEN_FILES:
            return MaskedPairs(read_tokens(paths.data), marks=WORDPIECE_MARKS, **window)
        return MaskedPairs(as_tokens(read_text(paths.data)), marks=BYTE_MARKS, **window)

    tokens = torch.zeros(1, size.sequence_length, dtype=torch.int64, device="meta")
    make = partial(bert_layers, size)
    return Model(size.name, make, bert_loss, open_data, (tokens, tokens), size.dropout, ("PostNormBlock",))


def _vision(
    size: VggSize | AlexNetSize | ResNetSize, make: Callable[..., list[Any]], *, repeated: str, dropout: float
) -> Model:
    def open_data(paths: DataPaths, seed: int) -> Dataset[Any]:
        shape = {"image_size": size.image_size, "classes": size.classes, "seed": seed}
        return SyntheticImages(**shape) if paths.data is None else ImageFolder(paths.data, **shape)

    sample = torch.zeros(1, 3, size.image_size, size.image_size, device="meta")
    return Model(size.name, partial(make, size), class_loss, open_data, sample, dropout, (repeated,))


def _gnmt(size: GnmtSize) -> Model:
    def open_data(paths: DataPaths, seed: int) -> Dataset[Any]:
        vocabulary: Vocabulary = ByteVocabulary()
        if paths.vocabulary is not None:
            vocabulary = WordVocabulary(paths.vocabulary)
        if vocabulary.size > size.vocabulary:
            raise ValueError(
                f"{paths.vocabulary} makes {vocabulary.size} tokens, and {size.name} has {size.vocabulary}; "
                "name a smaller vocabulary"
            )
        if (paths.data is None) is not (paths.target is None):
            raise ValueError("parallel text takes two files: name both, the source and its translation")
        known = paths.data is not None and paths.target is not None
        source, target = read_pairs(paths.data, paths.target) if known else synthetic_pairs(seed)  # type: ignore[arg-type]
        lengths = {"source_length": size.source_length, "target_length": size.target_length}
        return ParallelText(source, target, vocabulary=vocabulary, **lengths, seed=seed)

    source, target = (
        torch.zeros(1, length, dtype=torch.int64, device="meta") for length in (size.source_length, size.target_length)
    )
    sample = source, torch.zeros(1, dtype=torch.int64, device="meta"), target
    repeated = ("EncoderLayer", "DecoderLayer")
    return Model(size.name, partial(gnmt_layers, size), translation_loss, open_data, sample, size.dropout, repeated)


def _by_name(models: Iterable[Model]) -> Mapping[str, Model]:
    return {model.name: model for model in models}


MODELS = _by_name(
    [
        *(_gpt2(size) if size.causal else _bert(size) for size in MODEL_SIZES.values()),
        _gnmt(GNMT_TINY),
        _gnmt(GNMT16),
        *(_vision(size, resnet_layers, repeated="Bottleneck", dropout=0.0) for size in (RESNET_TINY, RESNET152)),
        *(_vision(size, vgg_layers, repeated="Convolution", dropout=size.dropout) for size in (VGG_TINY, VGG19)),
        *(
            _vision(size, alexnet_layers, repeated="Convolution", dropout=size.dropout)
            for size in (ALEXNET_TINY, ALEXNET)
        ),
    ]
)
