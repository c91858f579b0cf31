"""Reads tied weights from a checkpoint's files, where DeepSpeed sends them from one stage to the others.

A tied layer with a function of its own for its forward (the head, mostly) is not saved: stock sends it the weights of
the first stage that has the layer. That takes all workers at one moment; here they are read from that layer's file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.pipe.module import PipelineModule, TiedLayerSpec


@contextmanager
def tied_weights_from_files(
    module: PipelineModule, *, folder: Callable[[], str], read: Callable[..., Any]
) -> Iterator[None]:
    """Inside, what stock does with tied weights when it has read its layers needs no other worker.

    ``folder`` returns where stock reads layers from, ``read`` reads a file as stock does.
    """

    def read_tied() -> None:
        for key, comm in module.tied_comms.items():
            path = _file_of_tied(module, key, folder())
            if path is None or not Path(path).is_file():
                continue
            state = read(path, map_location=torch.device("cpu"))
            with torch.no_grad():
                for name in comm["weight_attr"]:
                    weight = module._recursive_getattr(comm["module"], name)
                    weight.copy_(state[_saved_name(comm["module"], weight, name)])

    module._synchronize_tied_weights = read_tied
    try:
        yield
    finally:
        del module._synchronize_tied_weights


def _saved_name(tied: torch.nn.Module, weight: torch.Tensor, name: str) -> str:
    """Under which name ``weight`` is in a state dict: its own where ``name`` is a property that leads to it."""
    return next((own for own, parameter in tied.named_parameters() if parameter is weight), name)


def _file_of_tied(module: PipelineModule, key: str, folder: str) -> str | None:
    """The file with the weights of tied layer ``key``: of the first place in the model that is saved."""
    for index, spec in enumerate(module._layer_specs):
        if isinstance(spec, TiedLayerSpec) and spec.key == key and spec.forward_fn is None:
            path: str = module.ckpt_layer_path(folder, index - module._local_start)
            return path
    return None
