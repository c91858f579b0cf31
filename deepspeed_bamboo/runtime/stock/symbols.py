"""The insides of DeepSpeed and torch that the plugin uses or replaces: each name, where it is, and why.

They are private, so a new version may rename or drop one. A worker looks for all of them when it starts, in about
10 ms, and says what is missing before anything is built. A test compares the list with the package.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from types import CodeType, FunctionType, ModuleType
from typing import Any

from deepspeed_bamboo.errors import UpgradeError
from deepspeed_bamboo.runtime.stock.attributes import STAGE_ATTRIBUTES

# The newest versions with which the whole test command and the fault sweep were run.
TRIED = {"deepspeed": "0.19.8", "torch": "2.11 to 2.13"}

_ENGINE = "deepspeed.runtime.pipe.engine:PipelineEngine"
_BF16 = "deepspeed.runtime.bf16_optimizer:BF16_Optimizer"
_ZERO = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer"
_FP16 = "deepspeed.runtime.fp16.fused_optimizer:FP16_Optimizer"
_FP16_UNFUSED = "deepspeed.runtime.fp16.unfused_optimizer:FP16_UnfusedOptimizer"
_MODULE = "deepspeed.runtime.pipe.module:PipelineModule"
_GRID = "deepspeed.runtime.pipe.topology:PipelineParallelGrid"
_C10D = "torch.distributed.distributed_c10d"
# There only where torch was built with NCCL, see ``applies``.
_NCCL = "torch.distributed:ProcessGroupNCCL"
_NCCL_OPTIONS = "torch.distributed:ProcessGroupNCCL.Options"

# By owner, "module" or "module:Class": its names, each with why the plugin needs it.
SYMBOLS: Mapping[str, Mapping[str, str]] = {
    "deepspeed": {
        "PipelineEngine": "replaced while deepspeed.initialize runs, which makes one for a PipelineModule",
        "initialize": "replaced in a worker, so that a script stays unmodified",
    },
    "deepspeed.ops": {"__compatible_ops__": "the shared-memory op is marked as not to be built"},
    "deepspeed.runtime.base_optimizer": {"ZeROOptimizer": "those that take the hook of torch's backward"},
    "deepspeed.utils.groups": {
        "_WORLD_GROUP": "forgotten with the default group that it was made from",
        "mpu": "stock looks up the active stage's grid there",
    },
    _ENGINE: {
        **dict.fromkeys(STAGE_ATTRIBUTES, "part of a stage: put aside and brought back as a whole"),
        # Methods that compute for the active stage.
        "_exec_backward_pass": "the backward of one micro-batch",
        "_exec_forward_pass": "the forward of one micro-batch",
        "_exec_load_micro_batch": "puts a micro-batch into its buffers",
        "_exec_optimizer_step": "the step of the replica that is shown on the console",
        "_exec_reduce_grads": "sums up gradients over the pipelines",
        "_exec_reduce_tied_grads": "sums up gradients of tied layers",
        "_reduce_outputs": "the loss of an evaluation",
        "_reserve_pipe_buffers": "makes a buffer for every micro-batch",
        "_scale_loss_by_gas": "the mean loss of a stage",
        "_take_model_step": "the step of every other replica",
        "reset_activation_shape": "the script says that shapes change",
        "zero_force_ds_cpu_optimizer": "not asked of replicas of a configured optimizer",
        "get_global_grad_norm": "not known while a script catches up",
        "is_first_stage": "of the active stage",
        "is_last_stage": "of the active stage",
        "get_additional_losses": "kept for scripts that catch up",
        "was_step_applied": "not known while a script catches up",
        # Methods that build a stage.
        "_backward_post_hook": "called by an optimizer of a replica after a backward",
        "_configure_distributed_model": "puts a replica's module into its precision",
        "_configure_lr_scheduler": "makes a replica's scheduler",
        "_configure_optimizer": "makes a replica's optimizer",
        "_create_module_forward_post_hook": "hooks of a replica's module",
        "_create_module_forward_pre_hook": "hooks of a replica's module",
        "_set_client_model": "the engine as a torch module shows the active stage",
        "zero_optimization": "whether pipelines share an optimizer's state",
        # Methods that are overridden, because they reach other workers or another worker's data.
        "_aggregate_total_loss": "overridden: the loss comes with the agreement",
        "_build_data_iter": "overridden: the data set is kept for other pipelines",
        "_exec_schedule": "overridden: runs the plugin's program",
        "_next_batch": "overridden: micro-batches by pipeline and step",
        "_report_progress": "overridden: one replica prints",
        "is_gradient_accumulation_boundary": "overridden: stages reduce one after the other",
        "set_train_micro_batch_size": "overridden: refused where a loader keeps its size",
        "set_dataiterator": "overridden: every worker keeps the data position",
        "set_dataloader": "overridden: every worker keeps the data position",
        # Checkpoints.
        "_copy_recovery_script": "overridden: writes into a directory that a captured checkpoint lacks",
        "_create_checkpoint_file": "makes the directory of a checkpoint",
        "_curr_ckpt_path": "where stock reads layers from",
        "_load_checkpoint": "overridden: bf16 without ZeRO is read apart",
        "_load_zero_checkpoint": "reads the bf16 optimizer",
        "_save_checkpoint": "overridden: saves all stages that a worker owns",
        "_save_zero_checkpoint": "overridden: done with the stage",
        "checkpoint_engine": "replaced while a checkpoint is captured or read",
        "load_universal_checkpoint": "whether files of another layout are read",
        # Values of the process.
        "_compute_loss": "an argument of eval_batch",
        "_get_optimizer_loss_scale": "what monitors get",
        "_config": "settings, compared between workers",
        "agg_additional_losses": "set as stock's aggregation does",
        "batch_fn": "the script's function for each micro-batch",
        "_configure_basic_optimizer": "makes the optimizer that the JSON names for another stage",
        "client_lr_scheduler": "the script's scheduler, or its function that makes one",
        "data_iterator": "the script's iterator",
        "deepspeed_io": "makes a loader for another pipeline",
        "dp_group_loss": "set as stock's aggregation does",
        "dynamic_shape": "whether shapes change from one micro-batch to the next",
        "eval_return_logits": "an argument of eval_batch",
        "fp16_enabled": "what monitors get",
        "get_lr": "what monitors get",
        "global_rank": "who writes to monitors",
        "is_data_parallel": "whether there are several pipelines",
        "micro_batch_size": "of a loader for another pipeline",
        "micro_batches": "of an iteration",
        "monitor": "gets the loss of an evaluation",
        "num_stages": "of the logical grid",
        "tput_timer": "must not wait for the device before every forward",
        "training_dataloader": "the script's loader",
    },
    "deepspeed.monitor.monitor:MonitorMaster": {},
    "deepspeed.runtime.config:DeepSpeedConfig": {"_param_dict": "the settings as the script gave them"},
    "deepspeed.utils.timer:ThroughputTimer": {"config": "made to wait for the device less often"},
    "deepspeed.runtime.checkpoint_engine.checkpoint_engine:CheckpointEngine": {
        "commit": "overridden by the one that captures",
        "create": "overridden by the one that captures",
        "is_data_parallel_writer": "whether a stage of this pipeline is saved",
        "is_decoupled": "whether the file latest is written later",
        "load": "reads tied weights",
        "makedirs": "overridden by the one that captures",
        "preserves_storage_sharing": "overridden by the one that captures",
        "save": "overridden by the one that captures",
    },
    "deepspeed.runtime.checkpoint_engine.checkpoint_engine:CheckpointCommitInfo": {},
    "deepspeed.runtime.engine:DeepSpeedEngine": {},
    "deepspeed.runtime.fp16.loss_scaler:DynamicLossScaler": {},
    "deepspeed.runtime.fp16.loss_scaler:LossScaler": {},
    "deepspeed.runtime.pipe.dualpipev:DualPipeVModule": {},
    "deepspeed.runtime.zero.config:ZeroStageEnum": {},
    "deepspeed.utils.tensor_fragment:fragment_address": {},
    "deepspeed.runtime.dataloader:RepeatingLoader": {},
    "deepspeed.runtime.pipe.module:TiedLayerSpec": {
        "forward_fn": "a tied layer with one is not saved",
        "key": "which layers share weights",
    },
    "deepspeed.runtime.pipe.module:LayerSpec": {"typename": "the kind of a layer, compared between workers"},
    _MODULE: {
        "get_additional_losses": "their names, where none are known",
        "_build": "builds the layers of another stage",
        "_grid": "replaced by the logical grid",
        "_layer_specs": "all layers of the model",
        "_local_start": "number of the first layer here",
        "_precompute_checkpointable_values": "activation checkpointing of a replica",
        "_recursive_getattr": "finds tied weights",
        "_set_bounds": "which layers a replica holds",
        "_synchronize_tied_weights": "replaced while a checkpoint is read",
        "_topo": "handed on to the logical grid",
        "activation_checkpoint_interval": "whether a replica checkpoints activations",
        "ckpt_layer_path": "the file of a layer",
        "forward_funcs": "emptied before a replica is built",
        "fwd_map": "emptied before a replica is built",
        "get_tied_weights_and_groups": "what is summed up over the stages",
        "global_rank": "of a replica's coordinate",
        "is_checkpointable_results": "emptied before a replica is built",
        "is_checkpointable_results_interval": "emptied before a replica is built",
        "micro_offset": "counts micro-batches where layers are seeded",
        "parts": "which layers belong to which stage",
        "stage_id": "of a replica's coordinate",
        "stage_owner": "which stage holds a layer",
        "tied_comms": "replaced by logical groups",
        "tied_modules": "emptied before a replica is built",
        "tied_weight_attrs": "emptied before a replica is built",
    },
    _GRID: {
        "_build_p2p_groups": "lists neighbours",
        "_topo": "set by the logical grid, which calls no constructor",
        **dict.fromkeys(
            (
                *("data_parallel_id", "data_parallel_size", "dp_group", "dp_groups", "dp_proc_group", "global_rank"),
                *("ds_model_proc_group", "ds_model_rank", "ds_model_world_size", "is_first_stage", "is_last_stage"),
                *("model_parallel_size", "p2p_groups", "pipe_groups", "pipe_parallel_size", "pp_group"),
                *("pp_proc_group", "slice_group", "slice_parallel_size", "slice_proc_group", "stage_id", "world_size"),
            ),
            "set by the logical grid, which calls no constructor",
        ),
    },
    _BF16: {
        "clip_grad": "the script may set it; the shadow's becomes the same",
        "_hp_grad": "marks a parameter whose fp32 gradient is in use",
        "optimizer": "torch's optimizer inside",
        "_hp_optimizer_states_linked": "links are made again after new state came",
        "_restore_from_bit16_weights": "after weights were read without an optimizer",
        "autoep_folding_tp_group": "an update that is left to stock",
        "bf16_groups": "parameters",
        "clear_hp_grads": "at the start of an iteration",
        "clear_lp_grads": "at the start of an iteration",
        "fp32_groups_flat_partition": "master weights",
        "fp32_groups_gradients": "accumulated gradients",
        "fp32_groups_gradients_flat": "accumulated gradients, as they are reduced",
        "fp32_groups_has_gradients": "which parameters have one",
        "get_grads_for_norm": "replaced: the norm is judged on the host",
        "has_moe_layers": "whose norm is left to stock",
        "immediate_grad_update": "an update that is left to stock",
        "mpu": "replaced by the logical grid",
        "register_grad_acc_post_hook": "for backwards in torch's style",
        "update_hp_grads": "replaced by a grouped update",
    },
    _ZERO: {
        "clip_grad": "the script may set it; the shadow's becomes the same",
        "_zero_padding": "marks padding among the gradients",
        "all_grad_tensors": "emptied when a reduction is undone",
        "averaged_gradients": "reduced gradients of this partition",
        "bit16_groups": "parameters",
        "_offload_accumulated_param_ids": "with offload: emptied when a reduction is undone",
        "_wait_for_offload_copies": "with offload: before gradients on the host are read",
        "accumulated_grads_in_cpu": "with offload: emptied when a reduction is undone",
        "cpu_offload": "the optimizer is on the host",
        "extra_large_param_to_reduce": "emptied when a reduction is undone",
        "grad_accum": "gradients of a parameter while they are accumulated",
        "has_moe_layers": "is refused",
        "ipg_buckets": "emptied when a reduction is undone",
        "custom_loss_scaler": "whether the script has set another scale",
        "external_loss_scale": "that scale",
        "local_overflow": "with offload: a gradient of this partition has overflowed",
        "loss_scaler": "the loss scale",
        "micro_step_id": "with offload: reset when a reduction is undone",
        "norm_for_param_grads": "with offload: the norms of this partition's gradients",
        "params_already_reduced": "reset when a reduction is undone",
        "partition_gradients": "is refused",
        "single_partition_of_fp32_groups": "master weights",
        "zenflow": "is refused",
    },
    _FP16: {
        "clip_grad": "the script may set it; the shadow's becomes the same",
        "fp16_groups": "parameters",
        "fp32_groups_flat": "master weights",
        "custom_loss_scaler": "whether the script has set another scale",
        "external_loss_scale": "that scale",
        "loss_scale_config": "the loss scale",
        "mpu": "replaced by the logical grid",
        "overflow_checker": "its grid is replaced by the logical one",
    },
    _FP16_UNFUSED: {
        "clip_grad": "the script may set it; the shadow's becomes the same",
        "fp16_groups": "parameters",
        "fp32_groups": "master weights",
        "custom_loss_scaler": "whether the script has set another scale",
        "external_loss_scale": "that scale",
        "loss_scale_config": "the loss scale",
        "mpu": "replaced by the logical grid",
        "overflow_checker": "its grid is replaced by the logical one",
    },
    "deepspeed.utils": {"mixed_precision_linkage": "links parameters to their fp32 values"},
    "deepspeed.utils.mixed_precision_linkage": {
        "_hp_mapping": "where a parameter's fp32 values are",
        "set_full_hp_param": "replaced by one that counts what it changes",
    },
    "deepspeed.utils.tensor_fragment:tensor_fragment": {"get_hp_fragment": "what a script writes by safe_set_full_*"},
    "deepspeed.runtime.utils:CheckOverflow": {"mpu": "replaced by the logical grid"},
    "deepspeed.runtime.utils": {
        "ds_pipe_replicated": "marks copies of tied weights, which no norm counts",
        "model_parallel": "marks parameters that a norm counts on every stage",
    },
    "deepspeed.ops.adam": {"DeepSpeedCPUAdam": "a step on the host, made independent of earlier ones"},
    "deepspeed.ops.adam:FusedAdam": {"multi_tensor_adam": "replaced on a CPU, where it depends on earlier steps"},
    _C10D: {
        "GroupMember": "what new_group gives to those outside",
        "_abort_process_group": "drops all stock groups",
        "_check_not_self_rank": "not asked where a worker stands for both ranks",
        "_get_default_group": "whether the plugin made it",
        "_update_default_pg": "puts the plugin's default group in the place of stock's",
        "monitored_barrier": "replaced: a barrier, in the groups that the plugin serves",
        "new_group": "replaced: a script's groups go on after a loss",
        "_world": "group ranks of logical groups are written there",
    },
    f"{_C10D}:_World": {
        **dict.fromkeys(
            (
                *("group_count", "pg_backend_config", "pg_coalesce_state", "pg_map", "pg_names", "pg_to_tag"),
                "tags_to_pg",
            ),
            "emptied when stock's groups are set aside",
        ),
        "pg_group_ranks": "group ranks of logical groups",
    },
    "torch._C:_distributed_c10d": {"_unregister_all_process_groups": "forgets stock's groups"},
    "torch.distributed:ProcessGroup": {
        "_device_types": "which devices a group serves",
        "_allgather_base": "overridden by logical groups and the default group",
        "allgather": "overridden by logical groups and the default group",
        "allreduce": "overridden by logical groups and the default group",
        "barrier": "overridden by logical groups and the default group",
        "broadcast": "overridden by logical groups and the default group",
        "recv": "overridden by the group of a worker that joins",
        "reduce": "overridden by logical groups and the default group",
        "send": "overridden by the group of a worker that joins",
    },
    "torch.distributed:Backend": {
        "backend_list": "whether the plugin's backend is known",
        "register_backend": "makes it known",
    },
    "torch.distributed:HashStore": {},
    "torch.distributed:PrefixStore": {},
    "torch.distributed:ProcessGroupGloo": {
        "_Options": "of a channel to one peer",
        "create_default_device": "of a channel to one peer",
        "create_device": "of a channel to one peer",
    },
    "torch.distributed:ProcessGroupGloo._Options": {
        "_devices": "the network that a channel uses",
        "_threads": "one is enough",
        "_timeout": "bounds every wait",
    },
    _NCCL: {
        "Options": "of a communicator with one peer",
        "abort": "ends all waiting",
        "eager_connect_single_device": "connects before the first transfer",
    },
    _NCCL_OPTIONS: {
        "_timeout": "bounds every wait",
        "config": "how many thread blocks a transfer may use",
        "is_high_priority_stream": "sends share no queue of the device with receives",
    },
    "torch": {
        "_foreach_add_": "adds gradients in one launch",
        "_foreach_copy_": "copies activations to the host in one launch",
    },
    "torch.utils._pytree": {"tree_map_only": "copies the tensors of a batch", "tree_leaves": "finds them"},
    "torch:Tensor": {"_version": "whether a tensor was changed in place"},
    "torch.nn:Module": {
        "_modules": "what a module registered besides its layers",
        "_non_persistent_buffers_set": "which buffers a replica leaves out of its state, too",
        "_forward_hooks_with_kwargs": "how the script has registered a hook, which a replica gets as well",
        "_forward_hooks_always_called": "the same",
        "_forward_pre_hooks_with_kwargs": "the same",
    },
    "deepspeed.runtime.activation_checkpointing.checkpointing": {
        "_CUDA_RNG_STATE_TRACKER": "named random states, seeded for every forward; Megatron's have the same name",
    },
    "torch.cuda": {"default_generators": "seeded for every forward"},
    "torch.multiprocessing.reductions:StorageWeakRef": {"cdata": "tells storages apart"},
    "torch.overrides:TorchFunctionMode": {"__torch_function__": "leaves out initial weights"},
}


def check_symbols(symbols: Mapping[str, Mapping[str, str]] = SYMBOLS) -> None:
    """Raise UpgradeError unless everything in ``symbols`` is there; imports the modules that have it."""
    missing = list(find_missing(symbols))
    if missing:
        installed = ", ".join(f"{name} {_version(name)}" for name in TRIED)
        tried = ", ".join(f"{name} {which}" for name, which in TRIED.items())
        raise UpgradeError(*missing, installed=installed, tried=tried)


@functools.cache
def require_symbols() -> None:
    """The same for all of SYMBOLS; once it has found them, it does nothing in this process and its forks."""
    check_symbols()


def require_stage_attributes(state: Mapping[str, Any]) -> None:
    """Raise UpgradeError unless ``state``, the attributes of a built engine, has everything that a stage is."""
    missing = [f"{_ENGINE}.{name} (part of a stage)" for name in STAGE_ATTRIBUTES if name not in state]
    if missing:
        tried = ", ".join(f"{name} {which}" for name, which in TRIED.items())
        raise UpgradeError(*missing, installed=f"deepspeed {_version('deepspeed')}", tried=tried)


def find_missing(symbols: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    """Each name of ``symbols`` that is not there, with its reason; an owner that is not there comes once."""
    known: dict[int, frozenset[str]] = {}
    for where, names in symbols.items():
        if not applies(where):
            continue
        owner = _find(where)
        if owner is None:
            yield f"{where} (all of it)"
            continue
        for name, why in names.items():
            if not _has(owner, name, known):
                yield f"{where}{'.' if ':' in where else ':'}{name} ({why})"


def applies(where: str) -> bool:
    """False for what torch has on GPUs only, where this is a torch without them."""
    from torch.version import cuda

    return cuda is not None or where not in (_NCCL, _NCCL_OPTIONS)


def _find(where: str) -> Any:
    module, _, path = where.partition(":")
    try:
        owner: Any = importlib.import_module(module)
        for part in path.split(".") if path else ():
            owner = getattr(owner, part)
    except (ImportError, AttributeError):
        return None
    return owner


def _has(owner: Any, name: str, known: dict[int, frozenset[str]]) -> bool:
    # A module may compute a name when it is asked for it, so what mentions the name is looked at before.
    if name in vars(owner) or (isinstance(owner, type) and hasattr(owner, name)):
        return True
    if id(owner) not in known:
        known[id(owner)] = mentioned_in(owner)
    return name in known[id(owner)] or hasattr(owner, name)


def mentioned_in(owner: type | ModuleType) -> frozenset[str]:
    """Every attribute that the code of a class (its parents' too) or a module reads or writes, by name or as text.

    So an attribute that exists on instances only, as most of an engine's do, is found without one.
    """
    names: set[str] = set()
    for part in owner.__mro__ if isinstance(owner, type) else (owner,):
        names.update(getattr(part, "__annotations__", ()))
        for value in vars(part).values():
            kind = type(value)  # isinstance would ask the value, and some of torch's warn then
            if issubclass(kind, (property, staticmethod, classmethod)):
                value = value.fget if kind is property else value.__func__
            if issubclass(type(value), FunctionType):
                _add_names(getattr(inspect.unwrap(value), "__code__", value.__code__), names)
    return frozenset(names)


def _add_names(code: CodeType, names: set[str]) -> None:
    names.update(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            _add_names(constant, names)
        elif isinstance(constant, str):
            names.add(constant)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "(not installed)"
