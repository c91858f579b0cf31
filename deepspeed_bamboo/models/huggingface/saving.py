"""Writes a pipeline's weights in the layout of transformers, and adapters in that of peft.

Whoever owns a stage writes it. With the plugin that may change meanwhile: then the new owner writes it again, and the
index, without which nobody reads the files, comes last.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepspeed_bamboo.models.huggingface.layers import LibraryLayer
from deepspeed_bamboo.models.huggingface.weights import INDEX, SINGLE

_SHARDS = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
_BASE_LAYER = ".base_layer."
_ADAPTER_FILE = "adapter_model.safetensors"
_ADAPTER_PART = re.compile(r"\.(lora_\w+)\.(\w+)(?=\.|$)")

Written = dict[str, dict[str, int]]
"""By file the bytes of each weight in it."""


def save_weights(engine: Any, folder: Path, config: Any) -> None:
    """Write the weights of all stages, the index and ``config.json``; collective. See ``Decoder.save_pretrained``."""

    def write_own() -> Written:
        return {
            _shard(module): _write(folder / _shard(module), _without_adapters(library_state(module)))
            for module in _own_modules(engine)
        }

    def finish(written: Written) -> None:
        config.save_pretrained(folder)
        sizes = {name: size for weights in written.values() for name, size in weights.items()}
        index = {
            "metadata": {"total_size": sum(sizes.values())},
            "weight_map": {name: file for file, weights in sorted(written.items()) for name in sorted(weights)},
        }
        _replace(folder / INDEX, lambda path: path.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8"))
        # transformers would take a whole file that was here before the index.
        for old in folder.glob("model*.safetensors"):
            if old.name == SINGLE or (_SHARDS.fullmatch(old.name) and old.name not in written):
                old.unlink()

    _in_two_steps(engine, folder, write_own, finish)


def save_adapter(engine: Any, folder: Path, adapter: Any) -> None:
    """Write an adapter's weights and configuration; collective. See ``Decoder.save_adapter``."""

    def write_own() -> Written:
        return {
            _part_of_adapter(module): _write(folder / _part_of_adapter(module), _adapters(library_state(module)))
            for module in _own_modules(engine)
        }

    def finish(written: Written) -> None:
        from safetensors.torch import load_file, save_file

        whole = {name: value for part in written for name, value in load_file(folder / part).items()}
        adapter.save_pretrained(folder)
        _replace(folder / _ADAPTER_FILE, lambda path: save_file(whole, path, metadata={"format": "pt"}))
        for part in written:
            (folder / part).unlink()

    _in_two_steps(engine, folder, write_own, finish)


def library_state(module: Any) -> dict[str, Tensor]:
    """The weights of a stage, a PipelineModule, by their names there; tied ones where they are first."""
    own = range(module._local_start, module._local_stop)
    layers = [layer for layer in module.modules() if isinstance(layer, LibraryLayer) and layer.position in own]
    return {name: tensor for layer in layers for name, tensor in layer.library_state().items()}


# ---- who writes when ---------------------------------------------------------------------------------------


def _in_two_steps(
    engine: Any, folder: Path, write_own: Callable[[], Written], finish: Callable[[Written], None]
) -> None:
    """All write what they own, then one writes what says that it is complete; each step is repeated after a loss.

    Nothing where the job did this before: the weights of then are not there any more.
    """
    if getattr(engine, "is_behind", False):
        return
    folder.mkdir(parents=True, exist_ok=True)
    parts = _agreed(engine, "save: weights", write_own)
    everything = {file: weights for part in parts for file, weights in part.items()}

    def finish_once() -> Written:
        if _is_first(engine):
            finish(everything)
        return {}

    _agreed(engine, "save: index", finish_once)


def _agreed(engine: Any, kind: str, body: Callable[[], Written]) -> Iterable[Written]:
    """What ``body`` returns on all ranks, once all have called it."""
    if hasattr(engine, "hosted_modules"):
        values: Mapping[str, Written] = engine.agree_on(kind, body)
        return values.values()
    return _gathered(body(), device=engine.device)


def _gathered(value: Written, *, device: torch.device) -> list[Written]:
    """Everybody's ``value``, under stock DeepSpeed; as JSON, so that nothing that is received can run code."""
    text = torch.frombuffer(bytearray(json.dumps(value).encode("utf-8")), dtype=torch.uint8)
    sizes = torch.zeros(torch.distributed.get_world_size(), dtype=torch.int64, device=device)
    sizes[torch.distributed.get_rank()] = len(text)
    torch.distributed.all_reduce(sizes)
    own = torch.zeros(int(sizes.max()), dtype=torch.uint8, device=device)
    own[: len(text)] = text
    parts = [torch.empty_like(own) for _ in sizes]
    torch.distributed.all_gather(parts, own)
    return [json.loads(bytes(part[: int(size)].cpu().tolist())) for part, size in zip(parts, sizes, strict=True)]


def _is_first(engine: Any) -> bool:
    return bool(engine.is_reporter) if hasattr(engine, "is_reporter") else torch.distributed.get_rank() == 0


def _own_modules(engine: Any) -> Iterator[Any]:
    """The stages of the first pipeline that this worker owns."""
    if hasattr(engine, "hosted_modules"):
        yield from (module for place, module in engine.hosted_modules().items() if place.pipeline == 0)
    elif engine.grid.get_data_parallel_id() == 0:
        yield engine.module


# ---- files ------------------------------------------------------------------------------------------------


def _shard(module: Any) -> str:
    return f"model-{_stage(module) + 1:05d}-of-{module.num_stages:05d}.safetensors"


def _part_of_adapter(module: Any) -> str:
    return f"adapter-part-{_stage(module)}.safetensors"


def _stage(module: Any) -> int:
    return list(module.parts).index(module._local_start)


def _write(path: Path, state: Mapping[str, Tensor]) -> dict[str, int]:
    from safetensors.torch import save_file

    tensors = {name: tensor.detach().to("cpu").contiguous() for name, tensor in state.items()}
    _replace(path, lambda partial: save_file(tensors, partial, metadata={"format": "pt"}))
    return {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file that is there whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    write(partial)
    partial.replace(path)


# ---- adapters ---------------------------------------------------------------------------------------------


def _without_adapters(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The model's own weights, by the names that they had before peft wrapped their layers."""
    return {name.replace(_BASE_LAYER, "."): value for name, value in state.items() if not _ADAPTER_PART.search(name)}


def _adapters(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """An adapter's weights by peft's names, which leave the adapter's own name out."""
    found = {name: value for name, value in state.items() if _ADAPTER_PART.search(name)}
    return {"base_model.model." + _ADAPTER_PART.sub(r".\1", name): value for name, value in found.items()}
