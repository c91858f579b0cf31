"""Every attribute of stock's engine belongs to a stage, to the process, or to something that the plugin has replaced.

What belongs to a stage is listed in ``stock/attributes.py``, and put aside when a worker goes on with another stage. A
version of DeepSpeed that adds or renames an attribute fails here until somebody has decided where it belongs.
"""

from __future__ import annotations

from typing import Any

import pytest

from deepspeed_bamboo.errors import UpgradeError
from deepspeed_bamboo.runtime.stock.attributes import STAGE_ATTRIBUTES
from deepspeed_bamboo.runtime.stock.symbols import require_stage_attributes
from tests.runtime import models
from tests.runtime.jobs import Jobs
from tests.runtime.scenarios import Training, build

# The same whatever stage the engine works on: settings, the script's data, clocks, hooks on the engine itself, the
# state of a call that no other stage can interrupt, and losses, which are the whole batch's.
_OF_THE_PROCESS = """
    _autoep_folding_group_handles _autoep_folding_spec _backward_hooks _backward_pre_hooks _buffers _compile_kwargs
    _compile_mode _compiled_regions _compute_loss _config _configure_zenflow _deepcompile_active
    _deepcompile_native_initialized _force_grad_boundary _forward_hooks _forward_hooks_always_called
    _forward_hooks_with_kwargs _forward_pre_hooks _forward_pre_hooks_with_kwargs _is_compiled
    _is_compiled_autograd_enabled _is_full_backward_hook _is_zenflow_update_boundary _load_state_dict_post_hooks
    _load_state_dict_pre_hooks _manual_backward_expected _non_persistent_buffers_set _parameters _python_gc_generation
    _running_engine_backward _running_engine_backward_count _running_engine_backward_lock _running_engine_step
    _state_dict_hooks _state_dict_pre_hooks _sync_zenflow_optimizer_lr _unmanaged_backward_count _zenflow_step
    agg_additional_losses agg_loss agg_train_loss batch_fn batch_timer checkpoint_engine client_lr_scheduler
    client_optimizer collate_fn config data_iterator device dist_backend dont_change_device dp_group_loss dp_world_size
    dynamic_shape enable_backward_allreduce engine_timers engine_timers_cache eval_return_logits flatten global_rank
    gradient_average has_attention_mask has_bool_tensors inside_no_sync_ctxt is_data_parallel is_grad_partitioned
    is_model_parallel is_pipe_parallel is_pipe_partitioned loaded_checkpoint_dp_world_size
    loaded_checkpoint_mp_world_size local_rank log_batch_step_id mesh_device micro_batch_size micro_batches monitor
    mp_world_size num_stages optimized_linear_base_weight_sharding optimized_linear_lora_enabled
    pipeline_enable_backward_allreduce pipeline_parallelism scale_wrt_gas seq_dp_world_size sequence_parallel_size
    summary_events timers torch_autocast_z0_gradscaler tput_timer training training_data training_dataloader unflatten
    use_ds_comm warn_unscaled_loss world_size zenflow
"""
OF_THE_PROCESS = frozenset(_OF_THE_PROCESS.split())
# Stock's way to send between stages, and to run a schedule: the plugin has its own. ``_modules`` is set with the stage.
# Experts are not supported in a pipeline.
_REPLACED = """
    _exec_instr _grad_layer_buf _is_gradient_accumulation_boundary _modules all_to_all_group expert_data_parallel_group
    expert_parallel_group first_gradient_send first_output_send gate_modules grad_partition_grad_layer_meta_cache
    has_moe_layers local_all_to_all_group meta_buffer moe_layers num_experts pipe_partition_grad_meta_cache
    pipe_partition_input_meta_cache pipe_partition_output_meta_cache pipe_recv_buf
"""
REPLACED = frozenset(_REPLACED.split())
# Who a process is; the same for all stages that it hosts.
RANKS = frozenset({"global_rank", "local_rank"})
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "zero1": {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}},
    "fp16": {"fp16": {"enabled": True}},
}


def stock_attributes() -> dict[str, dict[str, str]]:
    """By precision, the attributes of an engine that has trained and evaluated: plain ones with their value as text."""
    result = {}
    for name, settings in PRECISIONS.items():
        engine = build(Training(name, 2, settings=settings))
        batches = models.micro_batches(models.vectors, pipeline=0, first_step=0, count=4)
        engine.train_batch(batches)
        engine.eval_batch(batches)
        result[name] = {key: plain(value) for key, value in vars(engine).items()}
    return result


def plain(value: Any) -> str:
    return repr(value) if isinstance(value, (bool, int, float, str, type(None))) else ""


@pytest.fixture(scope="module")
def engines(jobs: Jobs) -> dict[int, Any]:
    """What the four workers of two pipelines with two stages found."""
    return jobs.run(stock_attributes, world=4).values


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_attribute_is_classified(engines: dict[int, Any], precision: str) -> None:
    classified = {*STAGE_ATTRIBUTES, *OF_THE_PROCESS, *REPLACED}
    for rank in range(4):
        found = set(engines[rank][precision])
        assert found - classified == set(), "new: say in stock/attributes.py or here what it belongs to"
        assert set(STAGE_ATTRIBUTES) - found == set(), "gone: no stage has it any more"


@pytest.mark.parametrize("precision", PRECISIONS)
def test_what_belongs_to_the_process_does_not_differ_between_stages(engines: dict[int, Any], precision: str) -> None:
    for name in OF_THE_PROCESS - RANKS:
        values = {engines[rank][precision].get(name) for rank in range(4)}
        assert len(values) == 1, f"{name} differs: {values}"


def test_every_class_is_of_use(engines: dict[int, Any]) -> None:
    found = {name for precision in PRECISIONS for name in engines[0][precision]}
    # Made only with a monitor.
    assert {*STAGE_ATTRIBUTES, *OF_THE_PROCESS, *REPLACED} - found == {"summary_events"}
    assert not set(STAGE_ATTRIBUTES) & OF_THE_PROCESS
    assert not (set(STAGE_ATTRIBUTES) | OF_THE_PROCESS) & REPLACED


def test_a_stage_without_one_of_its_attributes_is_an_error() -> None:
    state = dict.fromkeys(STAGE_ATTRIBUTES)
    require_stage_attributes(state)
    del state["pipe_buffers"]
    with pytest.raises(UpgradeError, match=r"PipelineEngine\.pipe_buffers \(part of a stage\)"):
        require_stage_attributes(state)
