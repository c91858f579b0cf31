"""A model of transformers without weights: its own forward, of which each layer of a pipeline computes its part.

The library's model is made on torch's meta device. Its decoder layers are replaced by recorders, which note with what
the model calls them (masks, rotary embeddings, positions), and whatever else has parameters by stand-ins. A layer of
the pipeline runs this frame to learn its arguments, or lends it its own part (a norm, an embedding of positions, the
head). So masks, positions and attention back ends are the library's, whatever the model.

Shapes: B micro-batch, S sequence, H hidden size, V vocabulary.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from deepspeed_bamboo.errors import ConfigError

_PROBED = (2, 3)  # B, S


@dataclass(frozen=True)
class Call:
    """With what the model calls one decoder layer, besides the hidden states."""

    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]


@dataclass
class _Recording:
    """What the recorders have seen in the present run. ``after``: what the last of them returns, if not its input.

    ``before_layers``: the stand-ins that were called so far, by path, and whether that was before all layers.
    """

    hidden: Tensor | None = None
    calls: list[Call] = field(default_factory=list)
    after: Tensor | None = None
    before_layers: dict[str, bool] = field(default_factory=dict)


class _Recorder(nn.Module):
    """In the place of a decoder layer."""

    def __init__(self, recording: _Recording, *, last: bool) -> None:
        super().__init__()
        self._recording, self._last = recording, last

    def forward(self, hidden_states: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
        """Returns its input, or what comes after all layers."""
        if not self._recording.calls:
            self._recording.hidden = hidden_states
        self._recording.calls.append(Call(arguments, keywords))
        return self._recording.after if self._last and self._recording.after is not None else hidden_states


class _StandIn(nn.Module):
    """In the place of a part with weights: returns its input, or for an embedding something that adds nothing."""

    def __init__(self, path: str, part: nn.Module, recording: _Recording) -> None:
        super().__init__()
        self._path, self._recording = path, recording
        self._dimension = part.embedding_dim if isinstance(part, nn.Embedding) else None

    def forward(self, given: Tensor, *_: Any, **__: Any) -> Tensor:
        """[B, S] -> [B, S, H] for an embedding."""
        self._recording.before_layers.setdefault(self._path, not self._recording.calls)
        if self._dimension is None:
            return given
        return torch.zeros(*given.shape, self._dimension, device=given.device, dtype=torch.bool)  # fits any type


class _Given(nn.Module):
    """In the place of the model under the head: returns hidden states that are there already, as ``kind``."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self._kind = kind
        self.hidden: Tensor | None = None

    def forward(self, *_: Any, **__: Any) -> Any:
        """What that model returns."""
        return self._kind(last_hidden_state=self.hidden)


class _TiedHead(nn.Module):
    """A head with the weights of an embedding."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self._weight = [weight]  # not a parameter of this module

    def forward(self, hidden: Tensor) -> Tensor:
        return functional.linear(hidden, self._weight[0])


class Skeleton:
    """The model of a transformers ``config`` (a causal language model), without weights.

    Args:
        config: a ``transformers.PretrainedConfig``; it is copied.
        attention: name of the attention back end, None for the library's choice.
        dtype: of the weights.

    Raises:
        ConfigError: for a model whose forward is no chain of decoder layers.
    """

    def __init__(self, config: Any, *, attention: str | None = None, dtype: torch.dtype = torch.float32) -> None:
        from transformers import AutoModelForCausalLM

        self.config = copy.deepcopy(config)
        self.config.use_cache = False
        choice = {} if attention is None else {"attn_implementation": attention}
        try:
            with torch.device("meta"):
                self._model: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                    self.config, dtype=dtype, **choice
                )
        except ValueError as error:
            if "Unrecognized configuration class" not in str(error):
                raise
            raise ConfigError(
                f"a {config.model_type} model is no causal language model (a decoder), and only those can be cut into "
                "stages here"
            ) from error
        self._model.eval()  # the stand-ins draw no random numbers
        self.name = type(self._model).__name__
        self.blocks = self._find_blocks()
        self.embedding = self._path_of(self._model.get_input_embeddings())
        self.head = self._path_of(self._model.get_output_embeddings())
        head = self._model.get_output_embeddings()
        self.tied = head.weight is self._model.get_input_embeddings().weight
        self._recording = _Recording()
        self._kept: tuple[Any, list[Call]] | None = None
        self._meta = {path: module for path, module in self._model.named_modules() if path}
        self._base = self._meta[self._model.base_model_prefix]
        self._check_that_all_has_a_place(self._chain)
        self._put_stand_ins()
        self.before, self.after, self.embeds_only = self._probe()
        self._check_that_all_has_a_place(*self.before, *self.after)
        self._given = _Given(self._output_kind)
        setattr(self._model, self._model.base_model_prefix, self._given)

    def __repr__(self) -> str:
        return f"Skeleton({self.name}, {len(self.blocks)} layers)"

    def __deepcopy__(self, memo: dict[int, Any]) -> Skeleton:
        return self

    # ---- parts -------------------------------------------------------------------------------------------

    def bare(self, path: str) -> nn.Module:
        """The part of the model that is called ``path``, with memory on the host for its weights but no values."""
        part: nn.Module = copy.deepcopy(self._meta[path])
        return part.to_empty(device="cpu").train()

    def initialise(self, module: nn.Module) -> None:
        """Give each part of ``module`` its first values by the library's rule, from torch's generator.

        Tensors with a true attribute ``_is_hf_initialized`` keep theirs.
        """
        with torch.no_grad():
            module.apply(self._model._init_weights)

    # ---- runs --------------------------------------------------------------------------------------------

    def calls(self, hidden: Tensor, mask: Tensor | None, positions: Tensor | None) -> list[Call]:
        """With what the model calls each of its layers for a micro-batch; kept until the next one is another.

        hidden [B, S, H] is asked for its shape, type and device only; mask and positions are [B, S] or None.
        """
        key = (hidden.shape, hidden.dtype, hidden.device, _same(mask), _same(positions))
        if self._kept is None or self._kept[0] != key:
            with torch.no_grad():
                self._run(hidden.detach(), mask, positions)
            self._kept = (key, self._recording.calls)
        return self._kept[1]

    def enter(self, embedded: Tensor, mask: Tensor | None, positions: Tensor | None, own: nn.ModuleDict) -> Tensor:
        """What the first layer gets for ``embedded`` tokens [B, S, H]. ``own``: the parts that come before it."""
        with self._lending(own):
            self._run(embedded, mask, positions)
        hidden = self._recording.hidden
        assert hidden is not None
        return hidden

    def leave(self, hidden: Tensor, own: nn.ModuleDict) -> Tensor:
        """What the model makes of the last layer's output [B, S, H]. ``own``: the parts that come after it."""
        with self._lending(own):
            result: Tensor = self._run(hidden.detach(), None, None, after=hidden)
        return result

    def logits(self, hidden: Tensor, head: nn.Module) -> Tensor:
        """[B, S, H] -> [B, S, V], by ``head`` and what the model does besides (soft caps, scales)."""
        self._given.hidden = hidden
        with self._lending({self.head: head}):
            try:
                result: Tensor = self._model(inputs_embeds=hidden, use_cache=False, return_dict=True).logits
            finally:
                self._given.hidden = None
        return result

    def tied_logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """As :meth:`logits`, with an embedding's weights [V, H]."""
        return self.logits(hidden, _TiedHead(weight))

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The library's loss: mean cross-entropy of the next token, logits [B, S, V], labels [B, S]."""
        result: Tensor = self._model.loss_function(
            logits=logits, labels=labels, vocab_size=self._model.config.get_text_config().vocab_size
        )
        return result

    def _run(
        self, hidden: Tensor, mask: Tensor | None, positions: Tensor | None, *, after: Tensor | None = None
    ) -> Tensor:
        self._recording.hidden, self._recording.calls, self._recording.after = None, [], after
        given = {"attention_mask": mask, "position_ids": positions}
        keywords = {name: value for name, value in given.items() if value is not None}
        try:
            output = self._base(inputs_embeds=hidden, use_cache=False, return_dict=True, **keywords)
        finally:
            self._recording.after = None
        self._output_kind = type(output)
        result: Tensor = output.last_hidden_state
        return result

    @contextmanager
    def _lending(self, own: Mapping[str, nn.Module] | nn.ModuleDict) -> Iterator[None]:
        places = [(*self._place(unescaped(path)), module) for path, module in own.items()]
        stand_ins = [holder._modules[name] for holder, name, _ in places]
        for holder, name, module in places:
            holder._modules[name] = module
        try:
            yield
        finally:
            for (holder, name, _), stand_in in zip(places, stand_ins, strict=True):
                holder._modules[name] = stand_in

    # ---- taking the model apart --------------------------------------------------------------------------

    def _find_blocks(self) -> tuple[str, ...]:
        wanted = self._model.config.get_text_config().num_hidden_layers
        lists = {path: module for path, module in self._model.named_modules() if isinstance(module, nn.ModuleList)}
        found = [path for path, module in lists.items() if len(module) == wanted]
        found = [path for path in found if not any(path.startswith(f"{other}.") for other in found)]
        if len(found) != 1:
            raise ConfigError(
                f"{self.name} has {len(found)} lists of {wanted} layers (num_hidden_layers), where a decoder has one; "
                "only causal language models made of one chain of decoder layers can be cut into stages"
            )
        return tuple(f"{found[0]}.{index}" for index in range(wanted))

    def _path_of(self, module: nn.Module | None) -> str:
        for path, part in self._model.named_modules():
            if part is module and path:
                return str(path)
        raise ConfigError(f"{self.name} has no embedding of tokens, or no head; only causal language models have both")

    def _place(self, path: str) -> tuple[nn.Module, str]:
        parent, _, name = path.rpartition(".")
        return self._meta[parent] if parent else self._model, name

    def _put_stand_ins(self) -> None:
        """From now on only what has no weights, such as rotary embeddings, is the library's."""
        chain = self.blocks[0].rpartition(".")[0]
        holder, name = self._place(chain)
        recorders = [_Recorder(self._recording, last=path == self.blocks[-1]) for path in self.blocks]
        holder._modules[name] = nn.ModuleList(recorders)
        for child, module in list(holder._modules.items()):
            path = f"{self._chain}.{child}"
            if path in (chain, self.embedding) or module is None:
                continue
            if isinstance(module, nn.Dropout) or any(True for _ in module.parameters()):
                holder._modules[child] = _StandIn(path, module, self._recording)
            else:
                self.initialise(module.to_empty(device="cpu"))

    def _probe(self) -> tuple[tuple[str, ...], tuple[str, ...], bool]:
        """Run the frame: which parts come before the layers, which after, and whether embedding is all before them.

        Raises ConfigError where the frame would compute something else than the model.
        """
        hidden = torch.zeros(*_PROBED, self.width, dtype=self._model.dtype, requires_grad=True)
        try:
            result = self._run(hidden, None, None)
        except (AttributeError, RuntimeError, TypeError, ValueError) as error:
            raise ConfigError(f"{self.name} can't be computed layer by layer ({error})") from error
        calls, called = self._recording.calls, self._recording.before_layers
        values = [value for call in calls for value in (*call.arguments, *call.keywords.values())]
        flat = [item for value in values for item in (value if isinstance(value, tuple | list) else [value])]
        if len(calls) != len(self.blocks) or result.shape != hidden.shape:
            raise ConfigError(f"{self.name} doesn't call its {len(self.blocks)} layers one after the other, each once")
        if any(isinstance(item, Tensor) and item.requires_grad for item in flat):
            raise ConfigError(f"{self.name} gives its layers more that is computed from tokens than the hidden states")
        before = tuple(path for path, is_before in called.items() if is_before)
        after = tuple(path for path, is_before in called.items() if not is_before)
        embeds_only = self._recording.hidden is hidden and not before
        self._recording.hidden, self._recording.calls = None, []
        return before, after, embeds_only

    def _check_that_all_has_a_place(self, *paths: str) -> None:
        """Raise ConfigError for weights that are neither embedding, head nor layers, nor in ``paths``."""
        known = (self.embedding, self.head, *paths, *self.blocks)
        left = [name for name in self._parameters() if not name.startswith(tuple(f"{path}." for path in known))]
        if left:
            raise ConfigError(
                f"{self.name} has weights outside of its decoder layers, embeddings, norm and head: "
                f"{', '.join(left[:3])}; such a model can't be cut into stages"
            )

    def _parameters(self) -> Iterator[str]:
        for path, module in self._meta.items():
            yield from (f"{path}.{name}" for name, value in module._parameters.items() if value is not None)

    @property
    def _chain(self) -> str:
        """The part of the model that calls the layers one after the other."""
        return self.blocks[0].rpartition(".")[0].rpartition(".")[0]

    @property
    def width(self) -> int:
        """H."""
        return int(self._meta[self.embedding].embedding_dim)


def escaped(path: str) -> str:
    """``path`` as a key of an ``nn.ModuleDict``, which takes no dots."""
    return path.replace(".", "/")


def unescaped(key: str) -> str:
    """Inverse of :func:`escaped`."""
    return key.replace("/", ".")


class _Same:
    """Equal to another one of the same tensor object with the same content, as long as that lives."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._version = weakref.ref(tensor), tensor._version

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Same):
            return NotImplemented
        mine = self._tensor()
        return mine is not None and mine is other._tensor() and self._version == other._version

    __hash__ = None  # type: ignore[assignment]


def _same(tensor: Tensor | None) -> _Same | None:
    return None if tensor is None else _Same(tensor)
