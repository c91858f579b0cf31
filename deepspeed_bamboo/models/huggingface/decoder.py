"""A causal language model of transformers, cut into the layers of a pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor

from deepspeed_bamboo.models.huggingface.layers import (
    AfterLayers,
    BeforeLayers,
    DecoderLayer,
    Head,
    TokenEmbedding,
    tied_head,
)
from deepspeed_bamboo.models.huggingface.saving import save_adapter, save_weights
from deepspeed_bamboo.models.huggingface.skeleton import Skeleton
from deepspeed_bamboo.models.huggingface.weights import NewWeights, SavedWeights, Weights, model_folder

_TIED_KEY = "embedding"


class Decoder:
    """A causal language model of transformers as a list of LayerSpecs, with its loss, and back.

    ::

        decoder = Decoder.from_pretrained("folder")
        module = PipelineModule(layers=decoder.layers(), loss_fn=decoder.loss, num_stages=4)
        engine, *_ = deepspeed.initialize(model=module, ...)
        decoder.save_pretrained(engine, "out")

    A micro-batch is ``(tokens, labels)`` or ``((tokens, mask), labels)`` or ``((tokens, mask, positions), labels)``,
    all [B, S] int64 and as transformers takes them: the loss shifts the labels, and -100 in them asks for nothing.

    Every layer is computed by the library's own code. Its weights are read, or drawn, when the layer is built, on the
    workers that hold it: nobody holds the whole model.
    """

    def __init__(self, skeleton: Skeleton, weights: Weights) -> None:
        self.skeleton = skeleton
        self._weights = weights

    @classmethod
    def from_pretrained(
        cls, name: str | Path, *, attention: str | None = None, dtype: torch.dtype = torch.float32
    ) -> Decoder:
        """The model in the folder ``name`` (or of that name on the hub), which has safetensors files.

        ``attention``: the attention back end (``"eager"``, ``"sdpa"``, ``"flash_attention_2"``), None for the
        library's choice. ``dtype``: of the weights before DeepSpeed casts them as its settings say.

        Raises ConfigError for a model that is no chain of decoder layers and for a folder without its files.
        """
        from transformers import AutoConfig

        folder = model_folder(name)
        skeleton = Skeleton(AutoConfig.from_pretrained(folder), attention=attention, dtype=dtype)
        return cls(skeleton, SavedWeights(folder))

    @classmethod
    def from_config(
        cls, config: Any, *, seed: int = 0, attention: str | None = None, dtype: torch.dtype = torch.float32
    ) -> Decoder:
        """A new model of a ``transformers.PretrainedConfig``. ``seed``: of its first weights; else as above."""
        return cls(Skeleton(config, attention=attention, dtype=dtype), NewWeights(seed))

    @property
    def config(self) -> Any:
        """The model's ``transformers.PretrainedConfig``."""
        return self.skeleton.config

    def layers(self) -> list[Any]:
        """The layers for ``PipelineModule(layers=...)``: embedding, what follows it, decoder layers, norm, head.

        With ``partition_method="type:DecoderLayer"`` each stage gets as many decoder layers.
        """
        made: list[Any] = [self._embedding()]
        if not self.skeleton.embeds_only:
            made.append(self._spec(BeforeLayers, len(made), self.skeleton.before))
        for index in range(len(self.skeleton.blocks)):
            made.append(LayerSpec(DecoderLayer, self.skeleton, self._weights, len(made), index))
        if self.skeleton.after:
            made.append(self._spec(AfterLayers, len(made), self.skeleton.after))
        made.append(self._embedding(head=True) if self.skeleton.tied else self._head(len(made)))
        return made

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The library's loss: mean cross-entropy of the next token in nats, logits [B, S, V], labels [B, S]."""
        return self.skeleton.loss(logits, labels)

    def save_pretrained(self, engine: Any, folder: str | Path) -> None:
        """Write the weights so that transformers' ``from_pretrained`` reads them; every rank calls it.

        Each worker writes the stages that it owns, a file each, into ``folder``, which all machines see; one writes
        the index and ``config.json``. With the plugin a loss meanwhile is survived. Adapters of peft are left out.
        """
        save_weights(engine, Path(folder), self.skeleton.config)

    def save_adapter(self, engine: Any, folder: str | Path, adapter: Any) -> None:
        """Write the weights of the adapter that ``adapter``, its peft configuration, has put into the module.

        ``peft.PeftModel.from_pretrained`` reads the folder. Every rank calls it, as :meth:`save_pretrained`.
        """
        save_adapter(engine, Path(folder), adapter)

    def _spec(self, kind: type[Any], position: int, paths: tuple[str, ...]) -> Any:
        return LayerSpec(kind, self.skeleton, self._weights, position, paths)

    def _head(self, position: int) -> Any:
        return self._spec(Head, position, (self.skeleton.head,))

    def _embedding(self, *, head: bool = False) -> Any:
        paths = (self.skeleton.embedding,)
        if not self.skeleton.tied:
            return self._spec(TokenEmbedding, 0, paths)
        arguments = (self.skeleton, self._weights, 0, paths)
        forward = {"forward_fn": tied_head} if head else {}
        return TiedLayerSpec(_TIED_KEY, TokenEmbedding, *arguments, tied_weight_attr="weight", **forward)
