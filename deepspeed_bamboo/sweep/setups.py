"""What a sweep's jobs train: the configurations, each as one immutable value."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from deepspeed_bamboo.core.grid import Grid
from deepspeed_bamboo.sweep.covering import pairwise

STEPS = 8


@dataclass(frozen=True)
class Setup:
    """One configuration of a small training job. Faults are not part of it."""

    name: str
    stages: int = 4
    pipelines: int = 1
    micro_batches: int = 4
    dtype: str = "fp32"  # or "bf16", "fp16"
    zero_stage: int = 0
    mode: str = "lazy"
    offload: str = "cpu"
    overlap: bool = False
    gradient_clipping: float = 1.0
    global_norm: bool = False  # of all stages; else stock's rule
    check_shadows_every: int = 0  # steps
    schedule: bool = False  # a learning rate that changes with every step
    script_arguments: tuple[str, ...] = ()
    few: int | None = None  # workers, fewer than coordinates

    @property
    def grid(self) -> Grid:
        """Its pipelines x stages."""
        return Grid(self.pipelines, self.stages)

    @property
    def workers(self) -> int:
        """One for each coordinate, or :attr:`few`."""
        return self.few or len(self.grid)

    @property
    def whole(self) -> Setup:
        """The same with a worker for each coordinate: what a job on few is compared with."""
        return self if self.few is None else replace(self, name=self.name.removesuffix(f"-on{self.few}"), few=None)

    @property
    def pipelines_alike(self) -> bool:
        """Whether every pipeline holds all of a stage's state, so that one can be copied to another."""
        return not self.zero_stage and self.dtype != "bf16"

    def arguments(self, *, configuration: str, event_log: str) -> list[str]:
        """Arguments for scripts/train.py. ``configuration``: the file that holds :meth:`settings`."""
        fixed = ["--model", "gpt2-tiny", "--steps", str(STEPS), "--stages", str(self.stages)]
        files = ["--deepspeed_config", configuration, "--event-log", event_log]
        return [*fixed, *files, *self.script_arguments]

    def settings(self, base: Mapping[str, Any]) -> dict[str, Any]:
        """The DeepSpeed configuration: ``base`` (configs/cpu-demo.json) with what this setup changes."""
        bamboo = dict(base.get("bamboo", {}))
        redundancy = {"mode": self.mode, "offload": self.offload, "overlap": self.overlap}
        settings = {
            **base,
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": self.micro_batches,
            "gradient_clipping": self.gradient_clipping,
            "bamboo": {**bamboo, "redundancy": {**bamboo.get("redundancy", {}), **redundancy}},
        }
        if self.few is not None:
            settings["bamboo"]["topology"] = {**bamboo.get("topology", {}), "pipelines": self.pipelines}
        if self.global_norm:
            settings["bamboo"]["gradient_norm"] = "global"
        if self.check_shadows_every:
            settings["bamboo"]["debug_check_shadows"] = self.check_shadows_every
        if self.dtype != "fp32":
            settings[self.dtype] = {"enabled": True}
        if self.dtype == "fp16":
            # A first scale that overflows, soon raised (with ZeRO: without it DeepSpeed's pipelines don't scale).
            settings["fp16"].update(initial_scale_power=24, loss_scale_window=2, hysteresis=1)
        if self.zero_stage:
            settings["zero_optimization"] = {"stage": self.zero_stage}
            settings["zero_allow_untested_optimizer"] = True
        if self.schedule:
            parameters = {"warmup_min_lr": 0.0, "warmup_max_lr": 0.003, "warmup_num_steps": STEPS}
            settings["scheduler"] = {"type": "WarmupLR", "params": parameters}
        return settings


FIRST_SETUPS = (Setup("M4"), Setup("M8", micro_batches=8))

MODE_SETUPS = (
    Setup("eager", mode="eager"),
    Setup("eager-overlap", mode="eager", overlap=True),
    Setup("full", mode="full"),
    Setup("eager-recompute", mode="eager", offload="recompute", script_arguments=("--dropout", "0.1")),
)

# What the covering setups combine. A value's name is part of the setup's name.
FACTORS: Mapping[str, Sequence[str]] = {
    "grid": ("1x2", "1x3", "1x4", "1x5", "1x6", "2x1", "2x2", "2x3", "3x1", "3x2"),  # pipelines x stages
    "micro_batches": ("fewer", "equal", "more"),  # than stages
    "redundancy": ("off", "lazy", "eager.none", "eager.cpu", "eager.recompute", "full"),
    "precision": ("fp32", "bf16", "fp16", "fp32.zero1", "bf16.zero1", "fp16.zero1"),
    "model": ("plain", "dropout", "tied", "tied.dropout", "checkpointing"),
    "update": ("clipped", "tightly", "unclipped", "global.norm", "schedule"),
}

_MODELS: Mapping[str, tuple[str, ...]] = {
    "plain": (),
    "dropout": ("--dropout", "0.1"),
    "tied": ("--tied",),
    "tied.dropout": ("--tied", "--dropout", "0.1"),
    "checkpointing": ("--activation-checkpoint-interval", "1", "--dropout", "0.1"),
}


@cache
def covering_setups() -> tuple[Setup, ...]:
    """Setups in which every two values of ``FACTORS`` meet that can."""
    return tuple(_setup(combination) for combination in pairwise(FACTORS, possible=_survives))


# Grids that start on fewer workers than coordinates; blocks of two to three stages, also of two pipelines.
_FEW = (("1x4", 3), ("1x4", 2), ("1x6", 4), ("2x2", 3), ("2x3", 4), ("3x2", 5))
_FEW_SETUPS = 18


@cache
def few_setups() -> tuple[Setup, ...]:
    """Setups that start on fewer workers than coordinates: every value of ``FACTORS`` that can be, several times.

    Not every pair: what a value does is covered with a worker for each coordinate; here it has to do it in blocks.
    """
    values = {name: [value for value in FACTORS[name] if value != "off"] for name in FACTORS if name != "grid"}
    result: list[Setup] = []
    for number in itertools.count():
        grid, workers = _FEW[number % len(_FEW)]
        turn = number // len(_FEW)
        chosen = {"grid": grid}
        for shift, (name, its) in enumerate(values.items()):
            chosen[name] = its[(number + turn * (shift + 1)) % len(its)]
        if not _survives(chosen):
            continue
        whole = _setup(chosen)
        result.append(replace(whole, name=f"{whole.name}-on{workers}", few=workers))
        if len(result) == _FEW_SETUPS:
            return tuple(result)
    raise AssertionError("unreachable")


def _survives(chosen: Mapping[str, str]) -> bool:
    """Whether there can be such a setup, and it can survive a loss: without shadows only from another pipeline."""
    grid, precision = chosen.get("grid", "3x6"), chosen.get("precision", "")
    spread = precision.endswith("zero1") or precision == "bf16"  # each pipeline has a part of the optimizer's state
    if chosen.get("redundancy") == "off" and (grid.startswith("1x") or spread):
        return False
    if grid in ("1x5", "1x6") and precision == "bf16" and chosen.get("model", "").startswith("tied"):
        return False  # the last stage is a tied head alone: DeepSpeed's bf16 optimizer fails at its norm
    return not (chosen.get("micro_batches") == "fewer" and grid.endswith("x1"))


def _setup(chosen: Mapping[str, str]) -> Setup:
    pipelines, stages = map(int, chosen["grid"].split("x"))
    mode, _, offload = chosen["redundancy"].partition(".")
    dtype, _, zero = chosen["precision"].partition(".")
    uniform = ("--partition", "uniform") if stages > 4 else ()
    update = chosen["update"]
    return Setup(
        "-".join(chosen.values()),
        stages=stages,
        pipelines=pipelines,
        micro_batches={"fewer": max(1, stages - 1), "equal": stages, "more": stages + 3}[chosen["micro_batches"]],
        dtype=dtype,
        zero_stage=1 if zero else 0,
        mode=mode,
        offload=offload or "cpu",
        gradient_clipping={"tightly": 0.05, "global.norm": 0.05, "unclipped": 0.0}.get(update, 1.0),
        global_norm=update == "global.norm",
        schedule=update == "schedule",
        check_shadows_every=0 if mode == "off" else 3,
        script_arguments=(*_MODELS[chosen["model"]], *uniform),
    )
