"""Shows what a script writes by DeepSpeed's ``safe_set_full_fp32_param`` and ``safe_set_full_optimizer_state``.

Stock writes through ``.data``, where torch's version counters don't count. By these counters the plugin sees what a
script changes between two steps, so here they count.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from deepspeed.utils import mixed_precision_linkage


def count_full_values() -> None:
    """Have every parameter that is linked to its fp32 values from now on count what is written there."""
    stock = mixed_precision_linkage.set_full_hp_param
    if getattr(stock, "counts_versions", False):
        return

    @functools.wraps(stock)
    def set_full_hp_param(parameter: Any, value: torch.Tensor, optim_state_key: str | None = None) -> None:
        stock(parameter, value, optim_state_key)
        if parameter._hp_mapping is not None:
            torch.autograd.graph.increment_version(parameter._hp_mapping.get_hp_fragment(optim_state_key))

    set_full_hp_param.counts_versions = True  # type: ignore[attr-defined]
    mixed_precision_linkage.set_full_hp_param = set_full_hp_param
