"""What MPP-LLaVA needs and a CPU without downloads has not."""

from __future__ import annotations

import json
import re
import sys
import types
from pathlib import Path
from typing import Any

import deepspeed
import torch
from codebase_parts import absent, made_module
from torch import nn

WIDTH, IMAGE_TOKEN = 32, 5


def omegaconf() -> None:
    """omegaconf is a small stand-in: YAML as dictionaries whose keys are attributes, too"""

    import yaml

    class Node(dict):  # type: ignore[type-arg]
        __setattr__ = dict.__setitem__

        def __getattr__(self, name: str) -> Any:
            try:
                return self[name]
            except KeyError:
                raise AttributeError(name) from None

    class Loader(yaml.SafeLoader):
        """Reads 2e-5 as a number, as omegaconf does."""

    number = re.compile(r"^[-+]?[0-9][0-9]*(\.[0-9]*)?[eE][-+]?[0-9]+$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+0123456789"))

    def node(value: Any) -> Any:
        return Node({key: node(one) for key, one in value.items()}) if isinstance(value, dict) else value

    def plain(value: Any) -> Any:
        return {key: plain(one) for key, one in value.items()} if isinstance(value, dict) else value

    class OmegaConf:
        @staticmethod
        def create(value: Any = None) -> Any:
            return node(value or {})

        @staticmethod
        def load(path: str) -> Any:
            return node(yaml.load(Path(path).read_text(encoding="utf-8"), Loader))

        @staticmethod
        def merge(*parts: Any) -> Any:
            merged = Node()
            for part in parts:
                for key, value in part.items():
                    both = isinstance(value, dict) and isinstance(merged.get(key), dict)
                    merged[key] = OmegaConf.merge(merged[key], value) if both else node(value)
            return merged

        @staticmethod
        def from_dotlist(settings: list[str]) -> Any:
            found = Node()
            for setting in settings:
                names, value = setting.split("=", 1)
                part = yaml.load(value, Loader)
                for name in reversed(names.split(".")):
                    part = {name: part}
                found = OmegaConf.merge(found, part)
            return found

        @staticmethod
        def to_container(value: Any, **_: Any) -> Any:
            return plain(value)

    made_module("omegaconf", OmegaConf=OmegaConf)


def mpp_absent() -> None:
    """packages for images, films and downloads are imported and not used; wandb prints what it is given"""
    absent(
        (
            *("timm", "iopath", "webdataset", "decord", "cv2", "skimage", "moviepy", "fairscale", "torchvision"),
            *("lavis.models.minigpt4qwen_models.Qformer", "lavis.models.eva_vit", "transformers.deepspeed"),
        )
    )

    begun = []

    def log(values: dict[str, Any], step: int) -> None:
        if not begun:
            raise RuntimeError("call wandb.init() before wandb.log()")
        sys.stdout.write(f"OWN LOG {step} {json.dumps(values)}\n")
        sys.stdout.flush()

    made_module("wandb", init=lambda **_: begun.append(True), log=log, finish=lambda: None)


def cuda_is_the_cpu() -> None:
    """cuda() does nothing, tensors for "cuda" are made on the CPU, communication is gloo's"""
    torch.cuda.set_device = lambda device: None
    nn.Module.cuda = lambda self, device=None: self  # type: ignore[method-assign,assignment]
    make_tensor, make_group = torch.tensor, deepspeed.init_distributed

    def tensor(data: Any, **options: Any) -> torch.Tensor:
        return make_tensor(data, **{**options, "device": "cpu"})

    def init_distributed(dist_backend: str | None = None, **options: Any) -> None:
        make_group("gloo", **options)

    torch.tensor, deepspeed.init_distributed = tensor, init_distributed


class _Attention(nn.Module):
    """A causal layer with the arguments of Qwen's; it uses positions and mask."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(
        self,
        hidden: torch.Tensor,
        rotary_pos_emb_list: Any = None,
        layer_past: Any = None,
        attention_mask: torch.Tensor | None = None,
        head_mask: Any = None,
    ) -> tuple[torch.Tensor]:
        cosine, sine = (part[0, :, 0, :].to(hidden.dtype) for part in rotary_pos_emb_list[0])
        query, key, value = self.mix(self.norm(hidden)).chunk(3, dim=-1)
        scores = (query * cosine) @ (key * cosine + sine).transpose(1, 2) / WIDTH**0.5
        length = hidden.shape[1]
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(future, torch.finfo(scores.dtype).min)
        if attention_mask is not None:
            scores = scores + attention_mask[:, 0]
        return (hidden + self.out(scores.softmax(-1) @ value),)


class _Positions(nn.Module):
    """Cosines and sines of positions."""

    def forward(self, length: int, ntk_alpha: float = 1.0) -> list[torch.Tensor]:
        angles = torch.arange(length).float()[:, None] / 10 ** torch.linspace(0, 2, WIDTH)[None]
        return [angles.cos()[None, :, None, :], angles.sin()[None, :, None, :]]


def tiny_qwen() -> None:
    """image encoder, Q-former, language model and tokenizer are tiny and random; what is around them is its own"""
    import transformers

    class Encoder(nn.Module):
        num_features = WIDTH

        def __init__(self) -> None:
            super().__init__()
            self.patches = nn.Linear(3 * 16, WIDTH)

        def forward(self, image: torch.Tensor) -> torch.Tensor:
            return self.patches(image.to(self.patches.weight.dtype).reshape(len(image), -1, 3 * 16))

    class Bert(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embeddings, self.encoder = nn.Module(), nn.Module()
            self.encoder.layer = nn.ModuleList()
            self.look = nn.Linear(WIDTH, WIDTH)

        def forward(self, query_embeds: torch.Tensor, encoder_hidden_states: torch.Tensor, **_: Any) -> Any:
            seen = self.look(encoder_hidden_states).mean(1, keepdim=True)
            return types.SimpleNamespace(last_hidden_state=query_embeds + seen)

    class QFormer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert, self.config = Bert(), types.SimpleNamespace(hidden_size=WIDTH)

    class Body(nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.config, self.use_dynamic_ntk = config, False
            self.wte, self.drop, self.ln_f = nn.Embedding(64, WIDTH), nn.Dropout(0.0), nn.LayerNorm(WIDTH)
            self.h, self.rotary_emb = nn.ModuleList(_Attention() for _ in range(4)), _Positions()

        def get_ntk_alpha(self, length: int) -> float:
            return 1.0

    class Qwen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = types.SimpleNamespace(hidden_size=WIDTH, num_hidden_layers=4)
            self.transformer, self.lm_head = Body(self.config), nn.Linear(WIDTH, 64, bias=False)

        def gradient_checkpointing_enable(self) -> None:
            """Its pipeline has checkpoints of its own."""

    class Letters:
        im_start_id, im_end_id, eod_id, pad_token_id = 1, 2, 0, 0

        def __call__(self, text: str) -> Any:
            pieces = re.findall(r"<\|extra_0\|>|.", text, re.DOTALL)
            return types.SimpleNamespace(
                input_ids=[IMAGE_TOKEN if len(piece) > 1 else 6 + ord(piece) % 58 for piece in pieces]
            )

    transformers.AutoTokenizer.from_pretrained = lambda *_, **__: Letters()
    transformers.AutoConfig.from_pretrained = lambda *_, **__: None
    transformers.AutoModelForCausalLM.from_pretrained = lambda *_, **__: Qwen()
    from lavis.models.minigpt4qwen_models.minigpt4qwen import Minigpt4Qwen  # type: ignore[import-not-found]

    def vision(self: Any, *_: Any) -> tuple[nn.Module, nn.Module]:
        return Encoder(), nn.LayerNorm(WIDTH)

    def queries(self: Any, count: int, width: int) -> tuple[nn.Module, nn.Parameter]:
        return QFormer(), nn.Parameter(torch.randn(1, count, WIDTH))

    Minigpt4Qwen.init_vision_encoder, Minigpt4Qwen.init_Qformer = vision, queries


def mpp_conversations() -> None:
    """the data set has made-up images of 8 x 8 and made-up conversations, one step's worth an epoch"""
    from lavis.tasks.base_task import BaseTask  # type: ignore[import-not-found]

    class Conversations(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __init__(self, count: int) -> None:
            self._count = count

        def __len__(self) -> int:
            return self._count

        def __getitem__(self, index: int) -> dict[str, Any]:
            image = torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(index))
            talk = ({"from": "user", "value": f"<ImageHere>{index}?"}, {"from": "assistant", "value": f"{7 * index}"})
            return {"image": image, "conversations": list(talk)}

    def build_datasets(self: Any, cfg: Any) -> Any:
        settings = cfg.run_cfg.deepspeed_config
        count = settings.gradient_accumulation_steps * settings.train_micro_batch_size_per_gpu
        return {"made-up": {"train": Conversations(count)}}

    BaseTask.build_datasets = build_datasets


MPP_SHIMS = (omegaconf, mpp_absent, cuda_is_the_cpu, tiny_qwen, mpp_conversations)
