"""Layers that torch.jit has compiled: nothing in them can be described, nor made again on another worker."""

from __future__ import annotations

from collections.abc import Iterator

import torch


def scripted_layers(module: torch.nn.Module) -> Iterator[str]:
    """What is wrong with them, a sentence for each of the stages' layers that is one, or has one in it.

    The loss function may be one: it is the script's own on every worker.
    """
    found: dict[str, str] = {}
    for path, part in module.named_modules():
        layer, _, below = path.partition(".")
        if isinstance(part, torch.jit.ScriptModule) and layer != "loss_fn":
            found.setdefault(layer, below)
    for layer, below in found.items():
        where = f"{below} of layer {layer}" if below else f"layer {layer}"
        yield (
            f"{where} is a module that torch.jit has compiled (script or trace), of which no other worker can make "
            "another that is alike; leave torch.jit out, use torch.compile, or set bamboo.redundancy.mode to "
            '"off" and start as many workers as there are stages'
        )
