"""What ``codebases.py`` has the launcher start: replaces what a codebase needs and a CPU has not, then runs its script.

    codebase_run.py NAME CHECKOUT ARGUMENTS...

Each step's loss is printed in full, whatever the script prints.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import runpy
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import deepspeed
import torch
from codebase_collie import COLLIE_SHIMS, run_collie_engine
from codebase_diffusion import DIFFUSION_SHIMS
from codebase_mpp import MPP_SHIMS
from codebase_parts import changed_text, changes_by_file, import_changed
from codebase_parts import made_module as _module
from torch import nn

from deepspeed_bamboo.models import half_precision


def cuda_device() -> None:
    """torch.cuda.set_device does nothing"""
    torch.cuda.set_device = lambda device: None


def torchvision() -> None:
    """torchvision has made-up CIFAR-10 images of 32 x 32, and a narrow AlexNet for them"""

    class AlexNet(nn.Module):
        def __init__(self, num_classes: int) -> None:
            super().__init__()
            widths = [3, 8, 16, 16]
            convolutions = [
                layer
                for inputs, outputs in itertools.pairwise(widths)
                for layer in (nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
            ]
            self.features, self.avgpool = nn.Sequential(*convolutions), nn.AdaptiveAvgPool2d(2)
            self.classifier = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, num_classes))

    class CIFAR10(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __init__(self, **_: Any) -> None:
            """All arguments are about downloading."""

        def __len__(self) -> int:
            return 256

        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            return torch.randn(3, 32, 32, generator=torch.Generator().manual_seed(index)), index % 10

    names = ("Compose", "Resize", "CenterCrop", "ToTensor", "Normalize")
    transforms = _module("torchvision.transforms", **dict.fromkeys(names, lambda *_, **__: None))
    models = _module("torchvision.models", AlexNet=AlexNet, vgg19=None)
    datasets = _module("torchvision.datasets", CIFAR10=CIFAR10)
    _module("torchvision", transforms=transforms, models=models, datasets=datasets)


def axolotl() -> None:
    """axolotl, whose data collators and rank helpers are imported and not used"""
    distributed = _module("axolotl.utils.distributed", is_main_process=lambda: False, zero_first=None)
    collators = _module("axolotl.utils.collators", DataCollatorForSeq2Seq=None)
    utils = _module("axolotl.utils", distributed=distributed, collators=collators)
    _module("axolotl", utils=utils)


def tiny_model_for_engine() -> None:
    """its engine is called as its train.py calls it, with a module of its own class that holds four linear layers"""


def megatron_without_vision() -> None:
    """imports of vision models and of deepspeed.compression are empty; nothing is compiled"""
    _module("megatron.model.vision.knn_monitor", compute_feature_bank=None)
    _module("deepspeed.compression.compress", init_compression=None, redundancy_clean=None)
    from megatron.data import dataset_utils  # type: ignore[import-not-found]

    dataset_utils.compile_helper = lambda: None


def megatron_data() -> None:
    """the data set has made-up tokens"""

    class Tokens(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return 4096

        def __getitem__(self, index: int) -> dict[str, Any]:
            drawn = torch.randint(0, 60, (33,), generator=torch.Generator().manual_seed(index))
            return {"text": drawn.numpy()}

    from megatron.data import gpt_dataset

    gpt_dataset.build_train_valid_test_datasets = lambda **_: (Tokens(), Tokens(), Tokens())


def lenient_views() -> None:
    """Tensor.view copies where it can't view, which the code for CPUs needs"""
    view = torch.Tensor.view

    def lenient(tensor: torch.Tensor, *shape: Any) -> torch.Tensor:
        try:
            return view(tensor, *shape)
        except RuntimeError:
            return tensor.reshape(*shape)

    torch.Tensor.view = lenient  # type: ignore[assignment,method-assign]


def old_llama_layers() -> None:
    """a LlamaDecoderLayer of transformers is called, and returns, as in the version that the code was written for"""
    from transformers.models.llama import modeling_llama

    class LlamaDecoderLayer(modeling_llama.LlamaDecoderLayer):
        def __init__(self, config: Any) -> None:
            config._attn_implementation = "eager"
            super().__init__(config, layer_idx=0)
            self.rotary = modeling_llama.LlamaRotaryEmbedding(config)

        def forward(self, hidden: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor) -> Any:
            embedded = self.rotary(hidden, positions)
            return (super().forward(hidden, attention_mask=mask, position_embeddings=embedded),)

    modeling_llama.LlamaDecoderLayer = LlamaDecoderLayer


def transpeeder_stand_ins() -> None:
    """loguru prints, flash_attn and sklearn are imported and not used, communication is gloo's"""
    printed = dict.fromkeys(("trace", "debug", "info", "warning", "error"), lambda text: print(text, flush=True))
    _module("loguru", logger=types.SimpleNamespace(add=lambda *_: None, **printed))
    importlib.import_module("transformers.models.llama.modeling_llama")  # which looks for flash_attn
    _module("flash_attn.flash_attn_interface", flash_attn_varlen_qkvpacked_func=None)
    _module("flash_attn.bert_padding", unpad_input=None, pad_input=None)
    _module("flash_attn")
    _module("sklearn.model_selection", train_test_split=None)
    _module("sklearn")
    make = deepspeed.init_distributed
    deepspeed.init_distributed = lambda **_: make("gloo")


def tiny_llama() -> None:
    """the model is a LLaMA of nine small layers, written by scripts/convert2ckpt.py, with a tokenizer of letters"""
    import transformers
    from convert2ckpt import write_ckpt  # type: ignore[import-not-found]

    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=9, num_attention_heads=2
    )

    class Letters:
        eos_token, pad_token_id, model_max_length = "~", 0, 33

        def __call__(self, texts: list[str], **_: Any) -> Any:
            rows = [[1 + ord(letter) % 63 for letter in text][-33:] for text in texts]
            return types.SimpleNamespace(input_ids=torch.tensor([row + [0] * (33 - len(row)) for row in rows]))

    transformers.AutoTokenizer.from_pretrained = lambda *_, **__: Letters()
    transformers.AutoConfig.from_pretrained = lambda *_, **__: config
    torch.manual_seed(0)
    partial = Path(f"llama-init-ckpt.{os.getpid()}")
    step = partial / "global_step001"
    step.mkdir(parents=True)
    write_ckpt(step, transformers.LlamaForCausalLM(config), config, 8)
    (partial / "latest").write_text("global_step001", encoding="utf-8")
    with contextlib.suppress(OSError):  # another rank's is there
        partial.rename("llama-init-ckpt")


def fp16_on_any_cpu() -> None:
    """DeepSpeed takes fp16 on a CPU that has no instructions for it, too"""
    half_precision.allow_on_cpus()


def unused_by_neox() -> None:
    """pkg_resources has only packaging, sentencepiece is imported and not used"""
    import packaging.version
    from transformers import GPT2Tokenizer, GPT2TokenizerFast  # noqa: F401 - which look for sentencepiece

    _module("pkg_resources", packaging=packaging)
    _module("sentencepiece")


def cuda_on_cpu() -> None:
    """Tensor.cuda is the tensor; in megatron's files torch.cuda is the CPU, a device for each rank"""
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor  # type: ignore[method-assign]
    stand_in: Any = types.ModuleType("torch")
    stand_in.__getattr__ = lambda name: getattr(torch, name)  # what else there is of torch
    nothing = dict.fromkeys(("set_device", "synchronize"), lambda *_: None)
    memory = [f"{which}memory_{what}" for which in ("", "max_") for what in ("allocated", "reserved")]
    stand_in.cuda = types.SimpleNamespace(
        LongTensor=torch.LongTensor,
        current_device=lambda: "cpu",
        device_count=lambda: int(os.environ["WORLD_SIZE"]),
        get_rng_state=torch.get_rng_state,
        set_rng_state=torch.set_rng_state,
        **nothing,
        **dict.fromkeys(memory, lambda: 0),
    )
    training = importlib.import_module("megatron.training")
    make = training.initialize_megatron
    training.initialize_megatron = lambda neox_args: make(neox_args, allow_no_cuda=True)
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron") and "torch" in vars(module):
            vars(module)["torch"] = stand_in


def apex_adam() -> None:
    """apex's FusedAdam is torch's AdamW"""
    _module("apex.optimizers", FusedAdam=torch.optim.AdamW)
    _module("apex")


def neox_evaluation() -> None:
    """forward_step gives a pipeline's evaluation an empty dict of metrics, too, which its caller unpacks"""
    training = importlib.import_module("megatron.training")
    forward = training.forward_step

    def forward_step(*args: Any, **kwargs: Any) -> Any:
        loss = forward(*args, **kwargs)
        return (loss, {}) if isinstance(loss, torch.Tensor) else loss

    training.forward_step = forward_step


def neox_data() -> None:
    """the data set has made-up tokens, and nothing is compiled for it"""

    class Tokens(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return 4096

        def __getitem__(self, index: int) -> dict[str, Any]:
            drawn = torch.randint(0, 500, (33,), generator=torch.Generator().manual_seed(index))
            return {"text": drawn.numpy()}

    from megatron.data import data_utils

    data_utils.compile_helper = lambda: None
    data_utils.build_train_valid_test_datasets = lambda **_: (Tokens(), Tokens(), Tokens())


SHIMS: dict[str, Callable[[], None]] = {
    shim.__name__: shim
    for shim in (
        *(cuda_device, torchvision, axolotl, tiny_model_for_engine),
        *(megatron_without_vision, megatron_data, lenient_views),
        *(old_llama_layers, transpeeder_stand_ins, tiny_llama),
        *(fp16_on_any_cpu, unused_by_neox, cuda_on_cpu, apex_adam, neox_data, neox_evaluation),
        *(*MPP_SHIMS, *COLLIE_SHIMS, *DIFFUSION_SHIMS),
    )
}


def print_losses() -> None:
    """Have whatever engine a script makes print each step's loss."""
    make = deepspeed.initialize

    def initialize(*args: Any, **kwargs: Any) -> Any:
        result = make(*args, **kwargs)
        _print_losses_of(result[0])
        return result

    deepspeed.initialize = initialize


def _print_losses_of(engine: Any) -> None:
    train = engine.train_batch

    def train_batch(*args: Any, **kwargs: Any) -> Any:
        loss = train(*args, **kwargs)
        sys.stdout.write(f"LOSS {engine.global_steps} {float(loss)!r}\n")  # at once: two workers may write on one line
        sys.stdout.flush()
        return loss

    engine.train_batch = train_batch


def run_qlora_engine(stages: str, steps: str, settings: str) -> None:
    """As its train.py does: its own ``initialize``, module and ``train_batch``."""
    from utils import engine as own  # type: ignore[import-not-found]

    torch.manual_seed(0)
    deepspeed.init_distributed("gloo")
    config = types.SimpleNamespace(eos_token_id=None)
    layers = [deepspeed.pipe.LayerSpec(nn.Linear, 8, 8) for _ in range(4)]
    module = own.CustomPipelineModule(
        layers=layers,
        use_column_major_topology=False,
        model=types.SimpleNamespace(config=config),
        num_stages=int(stages),
        loss_fn=nn.functional.mse_loss,
        partition_method="uniform",
    )
    module.mpu = lambda: module._grid
    engine, _ = own.initialize(model=module, config=settings, model_parameters=list(module.parameters()))
    print(f"made a {type(engine).__name__} for {steps} steps", flush=True)


def run(name: str, checkout: str, arguments: list[str], *, launch: bool = False) -> None:
    """Replace what is replaced, and run the codebase's script, or its launcher, with ``arguments``."""
    from codebases import CODEBASES

    codebase, folder = CODEBASES[name], Path(checkout)
    script = folder / (codebase.launcher if launch and codebase.launcher else codebase.script)
    sys.path[:0] = [str(folder), *(str(folder / path) for path in codebase.paths)]
    changes = changes_by_file(codebase.changed)
    own = changes.pop(codebase.script, [])
    import_changed({folder / file: its for file, its in changes.items()})
    for shim in codebase.shims:
        SHIMS[shim]()
    engines = {"qlora-pipe": run_qlora_engine, "collie": run_collie_engine}
    if name in engines:
        engines[name](*arguments)
        return
    print_losses()
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    if own:
        run_changed(script, own)
    else:
        runpy.run_path(str(script), run_name="__main__")


def run_changed(script: Path, changes: Sequence[tuple[str, str]]) -> None:
    """Run the script with the lines changed that ``docs/ways-in.md`` names; the file itself stays as it is."""
    text = changed_text(script.read_bytes(), changes, path=str(script))
    module = types.ModuleType("__main__")
    module.__file__ = str(script)
    sys.modules["__main__"] = module
    exec(compile(text, str(script), "exec"), module.__dict__)


def main() -> None:
    """See the module."""
    arguments = sys.argv[1:]
    if arguments[0].startswith("--local_rank"):
        del arguments[0]
    run(arguments[0], arguments[1], arguments[2:], launch=True)


if __name__ == "__main__":
    main()
