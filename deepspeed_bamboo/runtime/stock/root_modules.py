"""Subclasses of PipelineModule that have modules of their own beside the layers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

from deepspeed_bamboo.runtime.stock.script_hooks import LOSS


def modules_of_its_own(model: Any) -> Iterator[str]:
    """Why ``model``, a PipelineModule, can't be trained: one for each such module with weights.

    A stage that is made on another worker would have them before its layers and not after them, so that weights which
    are sent in order would be exchanged.
    """
    for name, module in model.named_children():
        if name.isdigit() or name in ("tied_modules", LOSS):
            continue
        if next(chain(module.parameters(), module.buffers()), None) is not None:
            yield (
                f"the PipelineModule ({type(model).__name__}) has a module with weights beside its layers: {name!r} "
                f"(a {type(module).__name__}), which can't be made again on another worker. Make it part of a layer, "
                "or use a Parameter or a buffer of the PipelineModule"
            )
