"""Runs a public codebase's own script on CPUs, tiny: plain DeepSpeed, with the plugin, and with each stage killed.

    python scripts/codebases.py NAME CHECKOUT [--stages N] [--steps 3] [--keep FOLDER]

CHECKOUT is a folder with the codebase; nothing is fetched. What is replaced of what the script needs (CUDA, data to
download) is printed first. Equal losses, to the last bit, are what is wanted; or, for a codebase whose engine overrides
the passes themselves, a refusal on all ranks before anything is trained. FOLDER keeps what each run printed and wrote.

    python scripts/codebases.py --list
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepspeed_bamboo.coordination.server import free_port

HERE = Path(__file__).parent
OPTIMIZER = {"type": "Adam", "params": {"lr": 0.001, "torch_adam": True}}


@dataclass(frozen=True)
class Codebase:
    """How to run one. ``script``: in the checkout; ``arguments``: with {names} as in ``_run``.

    ``shims``: names in ``codebase_run.py``. ``settings``: added to the configuration, with the same names. ``paths``:
    folders to import from in the checkout. ``refused``: what the plugin says, for one that can't work.
    ``launcher``: the codebase's own, in the checkout; it starts ``train.py``, a script with the line that makes agents.
    ``section_in``: the key of its configuration under which the section belongs, if it makes DeepSpeed's by itself.
    ``resumes``: run a second time, with the arguments ``to_resume`` added, it continues from what it has saved.
    ``log``: what its own log says, if it is to be equal, too; ``saved``: a folder whose tensors are to be, too.
    ``own_configuration``: it makes DeepSpeed's by itself, so BAMBOO_CONFIG names the section. ``changed``: lines that
    have to be changed, as docs/ways-in.md says: file, a pattern, and what takes its place. ``stages``: how many it is
    tried with.
    """

    script: str
    arguments: tuple[str, ...]
    shims: tuple[str, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    paths: tuple[str, ...] = ()
    refused: str | None = None
    launcher: str | None = None
    section_in: str | None = None
    resumes: bool = False
    to_resume: tuple[str, ...] = ()
    log: str | None = None
    saved: str | None = None
    own_configuration: bool = False
    changed: tuple[tuple[str, str, str], ...] = ()
    stages: int = 2


MEGATRON = {
    **{"num-layers": "4", "hidden-size": "32", "num-attention-heads": "2", "seq-length": "32", "vocab-size": "63"},
    **{"max-position-embeddings": "32", "micro-batch-size": "2", "global-batch-size": "8", "train-iters": "{steps}"},
    **{"lr": "0.001", "min-lr": "0.0001", "lr-decay-iters": "10", "lr-decay-style": "cosine", "clip-grad": "1.0"},
    **{"weight-decay": "0.1", "attention-dropout": "0", "hidden-dropout": "0", "num-workers": "0", "eval-iters": "1"},
    **{"pipeline-model-parallel-size": "{stages}", "distributed-backend": "gloo", "tokenizer-type": "NullTokenizer"},
    **{"deepspeed_config": "{settings}", "data-path": "none", "log-interval": "1"},
    **{"save": "saved", "load": "saved", "save-interval": "2"},
}
MEGATRON_LOG = r"iteration +\d+/|learning rate: \S+|lm loss: \S+|grad norm: \S+|validation .*lm loss value: \S+"
MEGATRON_OFF = ("masked-softmax", "bias-gelu", "bias-dropout", "gradient-accumulation")  # fused kernels

TRANSPEEDER = {
    **{"init_ckpt": "llama-init-ckpt", "pipe_parallel_size": "{stages}", "train_steps": "{steps}", "mode": "pretrain"},
    **{"save_steps": "{first}", "resume_step": "{saved}", "resume_ckpt": "output", "max_seq_len": "33"},
    **{"data_path": "{checkout}/data/alpaca_data_sample_oneline_format.json", "deepspeed_config": "{settings}"},
}

GPT_NEOX = {
    **{"pipe_parallel_size": "{stages}", "num_gpus": "{stages}", "global_num_gpus": "{stages}"},
    **{"num_layers": 4, "hidden_size": 32, "num_attention_heads": 2, "seq_length": 32, "max_position_embeddings": 32},
    **{"pos_emb": "rotary", "hidden_dropout": 0, "attention_dropout": 0, "checkpoint_activations": True},
    **{"tokenizer_type": "CharLevelTokenizer", "data_path": "none", "num_workers": 0, "distributed_backend": "gloo"},
    **{"train_iters": "{steps}", "lr_decay_iters": 10, "lr_decay_style": "cosine", "min_lr": 0.0001},
    **{
        "eval_interval": 2,
        "eval_iters": 1,
        "log_interval": 1,
        "checkpoint_factor": 2,
        "save": "saved",
        "load": "saved",
    },
    **{"fp16": {"enabled": True, "initial_scale_power": 8}, "zero_optimization": {"stage": 1}, "weight_decay": 0.1},
    **{"optimizer": {"type": "Adam", "params": {"lr": 0.001, "betas": [0.9, 0.95]}}, "master_port": "{port}"},
}
GPT_NEOX_LOG = r"iteration +\d+/|learning rate: \S+|lm_loss: \S+|loss scale: \S+|validation .*lm_loss value: \S+"

# Its YAML has the DeepSpeed configuration: bf16, ZeRO-1 with offload_optimizer, AdamW. An epoch is one step here.
MPP_OPTIONS = {
    **{"run.max_epoch": "{steps}", "run.num_workers": "0", "run.output_dir": "out", "run.init_lr": "0.001"},
    **{"model.load_finetuned": "False", "model.load_pretrained": "False", "model.num_query_token": "2"},
    **{"model.max_txt_len": "96", "run.deepspeed_config.gradient_accumulation_steps": "4"},
    "run.deepspeed_config.train_micro_batch_size_per_gpu": "2",
}

# Its own TOML file; the section is in the same file.
DIFFUSION = {
    **{"output_dir": "out", "dataset": "data.toml", "epochs": 100, "max_steps": "{steps}", "save_every_n_steps": 2},
    **{"model": {"type": "flux", "dtype": "float32"}, "pipeline_stages": "{stages}", "partition_method": "uniform"},
    **{"adapter": {"type": "lora", "rank": 4, "dtype": "float32"}, "warmup_steps": 2, "lr_scheduler": "cosine"},
    **{"micro_batch_size_per_gpu": 2, "activation_checkpointing": True, "gradient_clipping": 0.1},
    **{"optimizer": {"type": "adamw", "lr": 0.01, "betas": [0.9, 0.99], "weight_decay": 0.01}},
    **{"eval_datasets": [{"name": "held-out", "config": "data.toml"}], "eval_every_n_steps": 2},
}

DIFFUSION_WRITER = ("train.py", r"(?m)^(\s*tb_writer = \S+) if .*$", r"\1")  # on each rank: any may become rank 0
# For more than two stages: every rank reads, and all get the first one's targets.
DIFFUSION_READ_BY_ALL = (
    ("train.py", r"if not \(engine\.is_first_stage\(\) or .*\):", "if False:"),
    (
        "utils/dataset.py",
        r"(?m)^( *)assert model_engine\.is_first_stage\(\) or .*$",
        r"\1target, grid = target.to('cuda'), model_engine.grid\n"
        r"\1dist.broadcast(target, grid.stage_to_global(0), group=grid.get_pipe_parallel_group())\n"
        r"\1return target",
    ),
)

CODEBASES = {
    "deepspeed-examples": Codebase(
        "training/pipeline_parallelism/train.py",
        ("-p", "{stages}", "-s", "{steps}", "--backend=gloo", "--deepspeed_config", "{settings}"),
        ("cuda_device", "torchvision"),
    ),
    "megatron-deepspeed": Codebase(
        "pretrain_gpt.py",
        (
            *("--deepspeed", "--use-checkpoint-opt_param-scheduler"),
            *(part for name, value in MEGATRON.items() for part in (f"--{name}", value)),
            *(f"--no-{name}-fusion" for name in MEGATRON_OFF),
        ),
        ("megatron_without_vision", "megatron_data", "lenient_views"),
        log=MEGATRON_LOG,
        resumes=True,
    ),
    "transpeeder": Codebase(
        "examples/train.py",
        tuple(part for name, value in TRANSPEEDER.items() for part in (f"--{name}", value)),
        ("transpeeder_stand_ins", "fp16_on_any_cpu", "tiny_llama", "old_llama_layers"),
        # As in its ds_config_zero1.json, but for wall_clock_breakdown, with which plain DeepSpeed 0.19.8 fails here.
        settings={
            "train_batch_size": 4,
            "train_micro_batch_size_per_gpu": 1,
            "fp16": {"enabled": True, "initial_scale_power": 12},
            "zero_optimization": {
                "stage": 1,
                "offload_optimizer": {"device": "cpu", "pin_memory": True},
                "reduce_bucket_size": 1e6,
                "allgather_bucket_size": 1e6,
            },
            "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 2, "total_num_steps": 10}},
            "activation_checkpointing": {"partition_activations": False},
        },
        paths=("src", "scripts"),
        resumes=True,
        log=r"Saving at step +\d+",  # its lines of losses go by --local_rank, so they end with the first worker
    ),
    "gpt-neox": Codebase(
        "train.py",
        ("train.py", "{settings}"),
        ("unused_by_neox", "cuda_on_cpu", "fp16_on_any_cpu", "apex_adam", "neox_data", "neox_evaluation"),
        settings=GPT_NEOX,
        launcher="deepy.py",
        section_in="deepspeed_extra_args",
        resumes=True,
        log=GPT_NEOX_LOG,
    ),
    "mpp-llava": Codebase(
        "train_pipeline.py",
        (
            *("--cfg-path", "{checkout}/lavis/projects/pp_qwen14b/sft_100k_pp.yaml", "--num-stages", "{stages}"),
            *("--options", *(f"{name}={value}" for name, value in MPP_OPTIONS.items())),
        ),
        ("omegaconf", "mpp_absent", "cuda_is_the_cpu", "tiny_qwen", "mpp_conversations"),
        changed=(("train_pipeline.py", r"if \S+:(\s+wandb\.init)", r"if True:\1"),),  # any may become rank 0
        log=r"OWN LOG [^\r\n]+",
        own_configuration=True,
        saved="out",
    ),
    "diffusion-pipe": Codebase(
        "train.py",
        ("--config", "{settings}"),
        (
            *("diffusion_absent", "scalars_are_printed", "tensors_stay_on_the_cpu"),
            *("tiny_diffusion", "diffusion_latents"),
        ),
        settings=DIFFUSION,
        changed=(DIFFUSION_WRITER,),
        log=r"OWN LOG [^\r\n]+",
        own_configuration=True,
        saved="out",
        resumes=True,
        to_resume=("--resume_from_checkpoint",),
    ),
    "diffusion-pipe-deeper": Codebase(
        "train.py",
        ("--config", "{settings}"),
        (
            *("diffusion_absent", "scalars_are_printed", "tensors_stay_on_the_cpu"),
            *("tiny_diffusion", "diffusion_latents"),
        ),
        settings=DIFFUSION,
        changed=(DIFFUSION_WRITER, *DIFFUSION_READ_BY_ALL),
        log=r"OWN LOG [^\r\n]+",
        own_configuration=True,
        saved="out",
        stages=3,
    ),
    "collie": Codebase(
        "collie/utils/dist_utils.py",
        ("{stages}", "{steps}", "{settings}"),
        ("collie_absent", "four_linear_layers"),
        refused="which is not the plugin's engine",
    ),
    "qlora-pipe": Codebase(
        "utils/engine.py",
        ("{stages}", "{steps}", "{settings}"),
        ("axolotl", "tiny_model_for_engine"),
        refused="which is not the plugin's engine",
    ),
}


@dataclass(frozen=True)
class Run:
    """What one run printed, and the code that it ended with."""

    code: int
    output: str
    folder: Path = Path()

    @property
    def losses(self) -> dict[str, str]:
        """By step, as ``codebase_run.py`` prints them."""
        return dict(re.findall(r"^LOSS (\d+) (\S+)$", self.output, re.MULTILINE))

    @property
    def taken_over(self) -> list[str]:
        """The stages that were, in order: one more proof that the kill was where it should be."""
        return re.findall(r"took 0\.(\d+) over from", self.output)

    def logged(self, pattern: str | None) -> list[str]:
        """What its own log says, in order."""
        return re.findall(pattern, self.output) if pattern else []


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it. Returns 0 when all is as it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", choices=sorted(CODEBASES), help="which codebase")
    parser.add_argument("checkout", nargs="?", type=Path, help="the folder with it")
    parser.add_argument("--stages", type=int, help="2, but for those that are tried with more")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--keep", type=Path, help="a folder for what runs print and write; else that is removed")
    parser.add_argument("--list", action="store_true", help="what there is, and what is replaced for each")
    found = parser.parse_args(arguments)
    if found.list:
        for name, codebase in CODEBASES.items():
            print(f"{name}: {codebase.script}\n{_shims(codebase)}")
        return 0
    if found.name is None or found.checkout is None:
        parser.error("give the name of a codebase and the folder with it, or --list")
    if found.keep is not None and found.keep.exists() and any(found.keep.iterdir()):
        parser.error(f"{found.keep} is not empty; give an empty folder, or one that is not there yet")
    codebase = CODEBASES[found.name]
    stages = found.stages or codebase.stages
    if not (found.checkout / codebase.script).is_file():
        parser.error(f"{found.checkout} has no {codebase.script}, which a checkout of {found.name} has")
    print(f"{found.name}, {stages} stages, {found.steps} steps; replaced are\n{_shims(codebase)}", flush=True)
    with tempfile.TemporaryDirectory() as removed:
        folder = Path(removed) if found.keep is None else found.keep.resolve()
        return _try(found.name, found.checkout.resolve(), folder, stages=stages, steps=found.steps)


def _try(name: str, checkout: Path, folder: Path, *, stages: int, steps: int) -> int:
    codebase = CODEBASES[name]

    def run(title: str, *, bamboo: bool, killed: int | None = None) -> Run:
        place = folder / title.replace(" ", "-")
        place.mkdir(parents=True)
        result = _runs(name, checkout, place, stages=stages, steps=steps, bamboo=bamboo, killed=killed)
        print(f"{title}: exit code {result.code}, losses {list(result.losses.values())}", flush=True)
        return result

    stock = run("plain DeepSpeed", bamboo=False)
    refused = codebase.refused
    if refused is not None:
        result = run("with the plugin", bamboo=True)
        good = result.code != 0 and result.output.count(refused) >= stages and not result.losses
        print("refused at its start, on all ranks" if good else f"NOT refused:\n{result.output[-3000:]}")
        if stock.code:
            print(f"plain DeepSpeed does not run it\n{stock.output[-3000:]}")
            return 1
        return 0 if good else 1
    if stock.code or not stock.losses:
        print(f"plain DeepSpeed does not run it\n{stock.output[-3000:]}")
        return 1
    runs: list[tuple[str, int | None]] = [
        ("undisturbed", None),
        *((f"stage {stage} killed", stage) for stage in range(stages)),
    ]
    bad: list[str] = []
    for title, stage in runs:
        one = run(title, bamboo=True, killed=stage)
        lost = [] if stage is None else [str(stage)] * (2 if codebase.resumes else 1)
        if one.taken_over != lost or not _equal(one, stock, codebase):
            bad.append(title)
            print(f"{title}: NOT equal to plain DeepSpeed\n{one.output[-3000:]}")
            print(f"stages taken over: {one.taken_over}, to be: {lost}")
            print(f"its log: {one.logged(codebase.log)}\nplain DeepSpeed's: {stock.logged(codebase.log)}")
    if not bad:
        print("all equal, to the last bit" + (", and so after it was started again" if codebase.resumes else ""))
    return 1 if bad else 0


def _equal(one: Run, stock: Run, codebase: Codebase) -> bool:
    done = one.code == 0 and stock.code == 0 and bool(one.losses)
    logs = one.logged(codebase.log) == stock.logged(codebase.log)
    return (
        done and one.losses == stock.losses and logs and (codebase.saved is None or _saved(one, stock, codebase.saved))
    )


def _saved(one: Run, stock: Run, folder: str) -> bool:
    from codebase_files import differences, saved_tensors

    expected = saved_tensors(stock.folder / folder)
    wrong = differences(expected, saved_tensors(one.folder / folder))
    print(f"{one.folder.name}: {len(expected)} saved tensors{''.join(f', {text}' for text in wrong[:10]) or ', equal'}")
    return bool(expected) and not wrong


def _runs(name: str, checkout: Path, place: Path, *, stages: int, steps: int, bamboo: bool, killed: int | None) -> Run:
    """One run; and where the codebase resumes, a second one, in which the same stage is killed again."""
    results: list[Run] = []
    for done in (0, steps) if CODEBASES[name].resumes else (0,):
        step = done + 1 if done else min(2, steps)  # once with moments of the optimizer, once right after loading
        place_of_loss = {"step": step, "stage": killed, "at": "backward", "micro_batch": 1}
        faults = [] if killed is None else [place_of_loss]
        until = {"first": steps, "saved": done or -1, "steps": done + steps}
        results.append(_run(name, checkout, place, stages=stages, until=until, bamboo=bamboo, faults=faults))
        if results[-1].code:
            break
    return Run(results[-1].code, "".join(result.output for result in results), folder=place)


def _run(
    name: str,
    checkout: Path,
    place: Path,
    *,
    stages: int,
    until: Mapping[str, int],
    bamboo: bool,
    faults: list[dict[str, Any]],
) -> Run:
    codebase = CODEBASES[name]
    settings, port = place / "settings.json", free_port("127.0.0.1")
    values = {**until, "stages": stages, "settings": settings, "checkout": checkout, "port": port}
    section = {"bamboo": {"topology": {"max_restarts": 0}, "faults": faults}} if bamboo else {}
    settings.write_text(json.dumps(_settings(codebase, section, values)))
    more = codebase.to_resume if until["saved"] > 0 else ()
    arguments = [text.format(**values) for text in (*codebase.arguments, *more)]
    tail = [str(HERE / "codebase_run.py"), name, str(checkout), *arguments]
    if codebase.launcher is not None:
        head = [sys.executable]
        _write_script(place / "train.py", name, checkout, bamboo=bamboo)
    else:
        named = [] if codebase.own_configuration else ["--bamboo_config", str(settings)]
        launch = ["--module", "deepspeed_bamboo.launch", *named] if bamboo else []
        deepspeed = str(Path(sys.executable).with_name("deepspeed"))
        head = [deepspeed, "--num_accelerators", str(stages), "--master_port", str(port), *launch]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")]).strip(os.pathsep)
    if bamboo and codebase.own_configuration:
        environment["BAMBOO_CONFIG"] = str(settings)
    printed = place / "printed.txt"
    with printed.open("a", encoding="utf-8") as file:  # at once, so that a run that takes long can be watched
        before = file.tell()
        done = subprocess.run([*head, *tail], cwd=place, env=environment, stdout=file, stderr=file, check=False)
    return Run(done.returncode, printed.read_bytes()[before:].decode(errors="replace"))


def _settings(codebase: Codebase, section: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration: common, the codebase's own, and the section where it belongs."""
    common = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "gradient_clipping": 1.0}
    named = {f"{{{name}}}": value for name, value in values.items()}
    own = {key: named.get(str(value), value) for key, value in codebase.settings.items()}
    placed = {codebase.section_in: section} if codebase.section_in and section else section
    return {**common, "optimizer": OPTIMIZER, **own, **placed}


def _write_script(path: Path, name: str, checkout: Path, *, bamboo: bool) -> None:
    """What the codebase's launcher starts: its script, with the shims, and with the line that makes agents."""
    lines = [
        *(["import deepspeed_bamboo.launched"] if bamboo else []),
        "import sys",
        f"sys.path.insert(0, {str(HERE)!r})",
        "from codebase_run import run",
        f"run({name!r}, {str(checkout)!r}, sys.argv[1:])",
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _shims(codebase: Codebase) -> str:
    from codebase_run import SHIMS

    return "\n".join(f"- {SHIMS[name].__doc__}" for name in codebase.shims)


if __name__ == "__main__":
    sys.exit(main())
