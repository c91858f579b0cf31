"""Which attributes of DeepSpeed's engine belong to a stage. Imports nothing, so that the upgrade guard can read it."""

from __future__ import annotations

# Every attribute of the stock engine that belongs to a stage rather than to the process. A test classifies all others.
STAGE_ATTRIBUTES = (
    "module",
    "optimizer",
    "basic_optimizer",
    "lr_scheduler",
    "mpu",
    "grid",
    "stage_id",
    "prev_stage",
    "next_stage",
    "global_steps",
    "global_samples",
    "micro_steps",
    "skipped_steps",
    "losses",
    "_step_applied",
    "_global_grad_norm",
    "pipe_buffers",
    "num_pipe_buffers",
    "loss",
    "total_loss",
    "total_additional_losses",
    "fwd_outputs",
    "outputs",
    "grad_layer",
    "param_names",
    "data_parallel_group",
    "seq_data_parallel_group",
    "module_forward_pre_hook",
    "module_forward_post_hook",
    "using_bf16_optimizer",
    "checkpoint_mp_rank",
    "save_non_zero_checkpoint",
    "save_zero_checkpoint",
    "_support_torch_style_backward",
)

# Those that stock makes only when it needs them: while they are missing their value is None.
MADE_LATER = ("fwd_outputs",)

# What stock counts in its optimizer step.
COUNTERS = ("global_steps", "global_samples", "micro_steps")
