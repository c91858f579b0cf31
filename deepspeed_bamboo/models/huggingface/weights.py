"""Where the weights of layers come from: files, read a layer at a time, or the library's rule for new ones."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from deepspeed_bamboo.errors import ConfigError
from deepspeed_bamboo.models.huggingface.skeleton import Skeleton

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")  # what is no path of a folder
_WANTED = ["*.json", "*.safetensors"]
_DONE = "_is_hf_initialized"  # the library's own mark on a tensor that has its value


class Weights(Protocol):
    """Gives one part of a model its weights."""

    def part(self, skeleton: Skeleton, path: str) -> nn.Module:
        """The part of the model called ``path``, on the host, with its weights."""


class NewWeights:
    """Drawn by the library's rule, from a generator that depends on ``seed`` and the part's name alone.

    So they don't depend on the number of stages, and torch's generator stays where it was.
    """

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed

    def part(self, skeleton: Skeleton, path: str) -> nn.Module:
        """See :class:`Weights`."""
        module = skeleton.bare(path)
        digest = hashlib.sha256(f"{self._seed}/{path}".encode()).digest()
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(int.from_bytes(digest[:7], "big"))
            skeleton.initialise(module)
        return module


class SavedWeights:
    """Read from a folder that ``save_pretrained`` has written, safetensors files only.

    A file is opened for a part alone, so nobody holds more of the model than its own stages.

    Args:
        folder: with ``model.safetensors``, or with several files and their index.

    Raises:
        ConfigError: for a folder without such files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files = _files_by_name(folder)

    def part(self, skeleton: Skeleton, path: str) -> nn.Module:
        """See :class:`Weights`. Raises ConfigError for a weight that isn't there, or has another shape."""
        module = skeleton.bare(path)
        tensors = {**dict(module.named_parameters()), **_kept_buffers(module)}
        for name, tensor in tensors.items():
            with torch.no_grad():
                tensor.copy_(self._read(skeleton, f"{path}.{name}", tensor))
            setattr(tensor, _DONE, True)
        skeleton.initialise(module)  # what is in no file: buffers that the library makes anew
        for tensor in tensors.values():
            delattr(tensor, _DONE)
        return module

    def _read(self, skeleton: Skeleton, name: str, like: Tensor) -> Tensor:
        from safetensors import safe_open

        # Files of a model without its head leave the first part of the names out.
        short = name.partition(".")[2]
        found = next((given for given in (name, short) if given in self._files), None)
        if found is None:
            raise ConfigError(
                f"{self._folder} has no weights called {name}, which {skeleton.name} wants; convert the model with "
                f"transformers' from_pretrained and save_pretrained, which writes the names of this version"
            )
        with safe_open(self._folder / self._files[found], framework="pt") as file:
            value: Tensor = file.get_tensor(found)
        if value.shape != like.shape:
            raise ConfigError(
                f"{name} is {list(value.shape)} in {self._folder}, where {skeleton.name} wants {list(like.shape)}; "
                "its config.json is that of another model"
            )
        return value


def model_folder(name: str | Path) -> Path:
    """The folder of a model: ``name`` itself, or where the hub's files of the model of that name are kept."""
    if Path(name).is_dir():
        return Path(name)
    if not _HUB_NAME.fullmatch(str(name)):
        raise ConfigError(f"there is no folder {str(name)!r}; name one that transformers' save_pretrained has written")
    from huggingface_hub import snapshot_download

    print(f"there is no folder {str(name)!r} here: the hub is asked for a model of that name", file=sys.stderr)
    try:
        return Path(snapshot_download(str(name), allow_patterns=_WANTED))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"there is no folder {str(name)!r} here, and the hub gave no model of that name "
            f"({str(error).strip().partition(chr(10))[0]}); name a folder that save_pretrained has written"
        ) from error


def _files_by_name(folder: Path) -> Mapping[str, str]:
    if (folder / SINGLE).is_file():
        from safetensors import safe_open

        with safe_open(folder / SINGLE, framework="pt") as file:
            return dict.fromkeys(file.keys(), SINGLE)
    if (folder / INDEX).is_file():
        index: dict[str, dict[str, str]] = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        return index["weight_map"]
    raise ConfigError(
        f"{folder} has neither {SINGLE} nor {INDEX}; give a folder that transformers' save_pretrained has written"
    )


def _kept_buffers(module: nn.Module) -> dict[str, Tensor]:
    kept = module.state_dict().keys()
    return {name: buffer for name, buffer in module.named_buffers() if name in kept}
