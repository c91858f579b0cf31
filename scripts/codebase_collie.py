"""What CoLLiE needs and a CPU has not, and a run of its engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import deepspeed
import torch
from codebase_parts import absent
from torch import nn


def collie_absent() -> None:
    """megatron, flash_attn and pages of dash and gradio are imported and not used"""
    absent(("megatron", "flash_attn", "petrel_client", "fused_adan", "dash", "dash_uploader", "gradio", "diskcache"))
    absent(("dash_bootstrap_components", "wandb", "bitsandbytes", "collie.models", "collie.controller"))


def four_linear_layers() -> None:
    """its engine is called as its Trainer calls it, with a PipelineModel of four linear layers and DeepSpeed's grid"""


def run_collie_engine(stages: str, steps: str, settings: str) -> None:
    """As its Trainer does: its own ``initialize``, which makes its own engine."""
    from collie.module import PipelineModel  # type: ignore[import-not-found]
    from collie.utils import dist_utils  # type: ignore[import-not-found]

    torch.manual_seed(0)
    deepspeed.init_distributed("gloo")

    class Layers(PipelineModel):  # type: ignore[misc]
        __init__ = deepspeed.pipe.PipelineModule.__init__

    layers = [deepspeed.pipe.LayerSpec(nn.Linear, 8, 8) for _ in range(4)]
    module = Layers(layers=layers, num_stages=int(stages), loss_fn=nn.functional.mse_loss)
    found: dict[str, Any] = json.loads(Path(settings).read_text(encoding="utf-8"))
    engine, *_ = dist_utils.initialize(model=module, model_parameters=list(module.parameters()), config=found)
    print(f"made a {type(engine).__name__} for {steps} steps", flush=True)


COLLIE_SHIMS = (collie_absent, four_linear_layers)
