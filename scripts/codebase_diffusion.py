"""What diffusion-pipe needs and a CPU without downloads has not."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
from codebase_parts import absent, made_module
from torch import nn

WIDTH = 16


def diffusion_absent() -> None:
    """packages of its models, data sets and films are imported and not used; wandb, too; TOML files are read as JSON"""
    packages = ("comfy", "comfy_api", "hyvideo", "diffusers", "torchvision", "torchaudio", "imageio", "datasets")
    absent((*packages, "wandb", "bitsandbytes", "optimi", "pytorch_optimizer", "torchao", "utils.reduction"))
    made_module("toml", load=json.load)
    made_module("multiprocess", current_process=lambda: type("Process", (), {"authkey": b""})())


def scalars_are_printed() -> None:
    """torch.utils.tensorboard prints what it is given"""

    class SummaryWriter:
        def __init__(self, log_dir: Any) -> None:
            """The folder is not used."""

        def add_scalar(self, name: str, value: Any, step: int) -> None:
            if "time" not in name:
                sys.stdout.write(f"OWN LOG {name} {float(value)!r} {step}\n")
                sys.stdout.flush()

    made_module("torch.utils.tensorboard", SummaryWriter=SummaryWriter)


def tensors_stay_on_the_cpu() -> None:
    """to("cuda") does nothing, torch.cuda.set_device too; communication is gloo's"""
    torch.cuda.set_device = lambda device: None
    move, make_group = torch.Tensor.to, deepspeed.init_distributed

    def to(tensor: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        kept = [one for one in arguments if one != "cuda"]
        return move(tensor, *kept, **options) if kept or options else tensor

    torch.Tensor.to = to  # type: ignore[method-assign,assignment]
    deepspeed.init_distributed = lambda: make_group("gloo")


class Block(nn.Module):
    """A block of the stand-in's diffusion model."""

    def __init__(self) -> None:
        super().__init__()
        self.widen, self.narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.narrow(torch.nn.functional.silu(self.widen(hidden)))


class Transformer(nn.Module):
    """What the stand-in trains."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(WIDTH + 1, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(6))


class Entry(nn.Module):
    """The first layer: noisy latents and their time."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.enter = model.enter

    def forward(self, inputs: Any) -> torch.Tensor:
        latents, time = inputs
        return self.enter(torch.cat([latents, time[:, None]], dim=1)).requires_grad_()


class Middle(nn.Module):
    """A block as a layer of the pipeline."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.block(hidden)


def tiny_diffusion() -> None:
    """the model is small, on its own BasePipeline: adapters, loss, names of parameters and saver are its own"""
    from models import base  # type: ignore[import-not-found]
    from safetensors.torch import save_file

    class TinyPipeline(base.BasePipeline):
        name, framerate = "tiny", None

        def __init__(self, config: Any) -> None:
            self.config, self.adapter_target_modules, self.checkpointable_layers = config, ["Block"], ["Middle"]

        def get_vae(self) -> None:
            """Latents are made up."""

        def load_diffusion_model(self) -> None:
            torch.manual_seed(0)  # as all ranks would read the same file
            self.transformer = Transformer()
            for name, parameter in self.transformer.named_parameters():
                parameter.original_name = name

        def to_layers(self) -> list[nn.Module]:
            model = self.transformer
            return [Entry(model), *(Middle(block) for block in model.blocks), model.leave]

        def prepare_inputs(self, inputs: Any, timestep_quantile: float | None = None) -> Any:
            latents = inputs["latents"]
            noise = torch.randn_like(latents)
            times = torch.rand(len(latents))
            if timestep_quantile is not None:
                times = torch.full_like(times, timestep_quantile)
            noisy = latents + times[:, None] * (noise - latents)
            return (noisy, times), (noise - latents, inputs["mask"])

        def save_adapter(self, save_dir: Path, sd: Any) -> None:
            self.peft_config.save_pretrained(save_dir)
            save_file({name: tensor.contiguous() for name, tensor in sd.items()}, save_dir / "adapter.safetensors")

        def save_model(self, save_dir: Path, sd: Any) -> None:
            save_file({name: tensor.contiguous() for name, tensor in sd.items()}, save_dir / "model.safetensors")

    made_module("models.flux", FluxPipeline=TinyPipeline)


def diffusion_latents() -> None:
    """data sets have made-up latents and masks, two steps' worth an epoch; nothing is cached"""
    from utils import dataset  # type: ignore[import-not-found]

    class Latents:
        def __init__(self, dataset_config: Any, model: Any, **_: Any) -> None:
            self.dataset_config = dataset_config

        def post_init(self, rank: int, ranks: int, sizes: Any, micro_batches: int, image_sizes: Any) -> None:
            self._place, self._samples = (rank, ranks), sizes[None] * micro_batches

        def set_eval_quantile(self, quantile: float) -> None:
            """Only times depend on it."""

        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            generator = torch.Generator().manual_seed(index * self._place[1] + self._place[0])
            latents = torch.randn(self._samples, WIDTH, generator=generator)
            return {"latents": latents, "mask": (torch.rand(latents.shape, generator=generator) > 0.2).float()}

    class Manager:
        def __init__(self, *_: Any, **__: Any) -> None:
            """There are no models that would fill a cache."""

        def register(self, data: Any) -> None:
            """Nothing to do for it."""

        def cache(self) -> None:
            """All is made up."""

    dataset.Dataset, dataset.DatasetManager = Latents, Manager
    if not Path("data.toml").exists():
        partial = Path(f"data.{os.getpid()}")
        partial.write_text("{}", encoding="utf-8")
        partial.rename("data.toml")


DIFFUSION_SHIMS = (
    diffusion_absent,
    scalars_are_printed,
    tensors_stay_on_the_cpu,
    tiny_diffusion,
    diffusion_latents,
)
