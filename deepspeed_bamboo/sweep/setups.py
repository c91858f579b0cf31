"""What a sweep's jobs train: the configurations, each as one immutable value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deepspeed_bamboo.core.grid import Grid

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
    gradient_clipping: float = 1.0
    schedule: bool = False  # a learning rate that changes with every step
    script_arguments: tuple[str, ...] = ()

    @property
    def grid(self) -> Grid:
        """Its pipelines x stages."""
        return Grid(self.pipelines, self.stages)

    @property
    def workers(self) -> int:
        """One for each coordinate."""
        return len(self.grid)

    def arguments(self, *, configuration: str, event_log: str) -> list[str]:
        """Arguments for scripts/train.py. ``configuration``: the file that holds :meth:`settings`."""
        fixed = ["--model", "gpt2-tiny", "--steps", str(STEPS), "--stages", str(self.stages)]
        files = ["--deepspeed_config", configuration, "--event-log", event_log]
        return [*fixed, *files, *self.script_arguments]

    def settings(self, base: Mapping[str, Any]) -> dict[str, Any]:
        """The DeepSpeed configuration: ``base`` (configs/cpu-demo.json) with what this setup changes."""
        bamboo = dict(base.get("bamboo", {}))
        redundancy = {"mode": self.mode, "offload": self.offload}
        settings = {
            **base,
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": self.micro_batches,
            "gradient_clipping": self.gradient_clipping,
            "bamboo": {**bamboo, "redundancy": {**bamboo.get("redundancy", {}), **redundancy}},
        }
        if self.dtype != "fp32":
            settings[self.dtype] = {"enabled": True}
        if self.zero_stage:
            settings["zero_optimization"] = {"stage": self.zero_stage}
            settings["zero_allow_untested_optimizer"] = True
        if self.schedule:
            parameters = {"warmup_min_lr": 0.0, "warmup_max_lr": 0.003, "warmup_num_steps": STEPS}
            settings["scheduler"] = {"type": "WarmupLR", "params": parameters}
        return settings


FIRST_SETUPS = (Setup("M4"), Setup("M8", micro_batches=8))

FURTHER_SETUPS = (
    Setup("eager", mode="eager"),
    Setup("full", mode="full"),
    Setup("eager-recompute", mode="eager", offload="recompute", script_arguments=("--dropout", "0.1")),
    Setup("eager-dropout-M8", mode="eager", micro_batches=8, script_arguments=("--dropout", "0.1")),
    Setup("M2", micro_batches=2),
    Setup("P2", stages=2),
    Setup("P3", stages=3),
    Setup("D2P2", pipelines=2, stages=2),
    Setup("D3P1", pipelines=3, stages=1),
    Setup("D2P1", pipelines=2, stages=1),
    Setup("bf16", dtype="bf16"),
    Setup("fp16", dtype="fp16"),
    Setup("zero1", zero_stage=1),
    Setup("bf16-zero1-D2P2", dtype="bf16", zero_stage=1, pipelines=2, stages=2),
    Setup("dropout", script_arguments=("--dropout", "0.1")),
    Setup("tied", script_arguments=("--tied",)),
    Setup("checkpointing", script_arguments=("--activation-checkpoint-interval", "1", "--dropout", "0.1")),
    Setup("clipping", gradient_clipping=0.05),
    Setup("no-clipping", gradient_clipping=0.0),
    Setup("schedule", schedule=True),
)
