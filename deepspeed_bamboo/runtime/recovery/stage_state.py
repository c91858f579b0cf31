"""Copies of a stage's whole state, for a replica on another worker, and digests of it."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from deepspeed_bamboo.runtime.comm.encoding import Slot
from deepspeed_bamboo.runtime.comm.layout import in_layout, layout_of
from deepspeed_bamboo.runtime.stock.attributes import COUNTERS
from deepspeed_bamboo.runtime.stock.clipping import clipping_of
from deepspeed_bamboo.runtime.stock.gradients import accept_scale_state, kept_gradients, master_weights, scale_state
from deepspeed_bamboo.runtime.stock.hook_values import accept_hook_state, hook_state
from deepspeed_bamboo.runtime.stock.optimizer_values import accept_optimizer_values, optimizer_values
from deepspeed_bamboo.runtime.stock.plain_forms import device_of
from deepspeed_bamboo.runtime.stock.plain_values import (
    accept_plain_of_the_script,
    accept_plain_values,
    plain_of_the_script,
)
from deepspeed_bamboo.runtime.stock.replica import StageReplica
from deepspeed_bamboo.runtime.stock.scheduler_state import set_scheduler_state

_COUNTERS = (*COUNTERS, "skipped_steps")


@dataclass(frozen=True)
class PackedState:
    """A stage's state for the way: ``tensors``, each where it lies, and all else with a :class:`Slot` for each."""

    structure: Any
    tensors: list[torch.Tensor]

    def on(self, device: torch.device) -> PackedState:
        """The same with all tensors on ``device``, for a way from device to device."""
        return PackedState(self.structure, [tensor.to(device) for tensor in self.tensors])


def pack_state(replica: StageReplica) -> PackedState:
    """Everything that makes ``replica`` what it is between two iterations.

    The tensors are the replica's own: whoever sends them waits until they are received before it changes them. Only
    buffers, which a forward may change, are copies, and so are gradients that an optimizer keeps, which a reduction
    may change. An offloaded optimizer's tensors are on the host.
    """
    rest = pack_rest(replica)
    attributes = replica.attributes
    module, optimizer = attributes["module"], attributes["optimizer"]
    state = {
        "parameters": [parameter.detach() for parameter in module.parameters()],
        "buffers": [buffer.detach().clone() for buffer in module.buffers()],
        "masters": [master.detach() for master in master_weights(optimizer)],
        "gradients": [gradient.detach().clone() for gradient in kept_gradients(optimizer)],
        "optimizer": None if optimizer is None else attributes["basic_optimizer"].state_dict(),
        **rest,
    }
    tensors: list[torch.Tensor] = []
    return PackedState(_take_out(state, tensors, device_of(module)), tensors)


def pack_rest(replica: StageReplica) -> dict[str, Any]:
    """Of what :func:`pack_state` packs, what DeepSpeed's own files lack, or have for other purposes."""
    replica.finish_step()
    attributes = replica.attributes
    module = attributes["module"]
    scheduler = attributes["lr_scheduler"] or replica.script_scheduler
    return {
        "scheduler": None if scheduler is None else scheduler.state_dict(),
        "counters": {name: attributes[name] for name in _COUNTERS},
        "norm": attributes.get("_global_grad_norm"),
        "micro_offset": replica.micro_offset,
        "values": replica.moving.all_values(module),
        "hooks": hook_state(module),
        "attributes": replica.moving_attributes.state(module, moving_only=False),
        "clip": clipping_of(attributes["optimizer"]),
        "scale": scale_state(attributes["optimizer"]),
        "own": [plain_of_the_script(holder) for holder in (attributes["basic_optimizer"], scheduler)],
        "kept": [optimizer_values(holder, module) for holder in (attributes["basic_optimizer"], scheduler)],
    }


def unpack_rest(replica: StageReplica, state: dict[str, Any]) -> None:
    """Make ``replica`` in these things, too, what it was."""
    attributes = replica.attributes
    attributes["_global_grad_norm"] = state["norm"]
    if state["scheduler"] is not None and attributes["lr_scheduler"] is not None:
        set_scheduler_state(attributes["lr_scheduler"], state["scheduler"])
    else:
        replica.scheduler_state = state["scheduler"]
    accept_plain_values(attributes["module"], state["values"])
    accept_hook_state(attributes["module"], state.get("hooks"))
    replica.moving_attributes.accept(attributes["module"], state.get("attributes"))
    if state["clip"] is not None:
        attributes["optimizer"].clip_grad = state["clip"]
    accept_scale_state(attributes["optimizer"], state.get("scale") or {})
    holders = (attributes["basic_optimizer"], attributes["lr_scheduler"] or replica.script_scheduler)
    for holder, own in zip(holders, state["own"], strict=True):
        accept_plain_of_the_script(holder, own)
    for holder, kept in zip(holders, state.get("kept", ()), strict=False):
        replica.moving_attributes.refuse(accept_optimizer_values(holder, attributes["module"], kept))
    attributes.update(state["counters"])
    replica.micro_offset = state["micro_offset"]


def _take_out(value: Any, tensors: list[torch.Tensor], device: torch.device) -> Any:
    """``value`` with every tensor moved to ``tensors``, but for single numbers beside ``device``, as a step count."""
    if isinstance(value, torch.Tensor):
        if value.device != device and not value.dim():
            return value
        tensors.append(value)
        return Slot(len(tensors) - 1)
    if isinstance(value, dict):
        return {key: _take_out(item, tensors, device) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_take_out(item, tensors, device) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return value


def _put_back(value: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(value, Slot):
        return tensors[value.index]
    if isinstance(value, dict):
        return {key: _put_back(item, tensors) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_put_back(item, tensors) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return value


def unpack_state(replica: StageReplica, packed: PackedState) -> None:
    """Make ``replica`` bitwise equal to the one that was packed. Values are copied into its own tensors."""
    state: dict[str, Any] = _put_back(packed.structure, packed.tensors)
    # The optimizer would keep what it is given, which belongs to somebody else.
    state["optimizer"] = copy.deepcopy(state["optimizer"])
    attributes = replica.attributes
    module, optimizer = attributes["module"], attributes["optimizer"]
    with torch.no_grad():
        for target, value in zip(module.parameters(), state["parameters"], strict=True):
            target.copy_(value)
        for target, value in zip(module.buffers(), state["buffers"], strict=True):
            target.copy_(value)
        for target, value in zip(master_weights(optimizer), state["masters"], strict=True):
            target.copy_(value)
        for target, value in zip(kept_gradients(optimizer), state["gradients"], strict=True):
            target.copy_(value)
    if optimizer is not None:
        attributes["basic_optimizer"].load_state_dict(state["optimizer"])
        _keep_forms(attributes["basic_optimizer"], state["optimizer"]["state"])
    if hasattr(optimizer, "_hp_optimizer_states_linked"):
        # Stock's links from parameters to optimizer state point to what was there before; it makes them anew.
        optimizer._hp_optimizer_states_linked = False
    unpack_rest(replica, state)


def _keep_forms(optimizer: torch.optim.Optimizer, state: dict[Any, Any]) -> None:
    """torch casts state to its parameter's type when it loads; make it again of the type that it had.

    It lies in memory as its parameter does, as optimizers make it; kernels that step several tensors rely on it.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, values in state.items():
        loaded = optimizer.state.get(parameters[index], {}) if isinstance(index, int) else {}
        for name, value in values.items():
            its = loaded.get(name)
            if isinstance(value, torch.Tensor) and isinstance(its, torch.Tensor) and its.dtype != value.dtype:
                loaded[name] = its = value.to(its.device)
            if isinstance(its, torch.Tensor) and isinstance(index, int) and its.shape == parameters[index].shape:
                loaded[name] = in_layout(its, layout_of(parameters[index]))


def checksum(tensors: Sequence[torch.Tensor]) -> int:
    """A number that tells damaged copies; computed where the tensors are, so that it costs no transfer."""
    total = torch.zeros((), dtype=torch.int64, device=tensors[0].device if tensors else "cpu")
    for index, tensor in enumerate(tensors):
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        flat = flat if flat.storage_offset() % 8 == 0 else flat.clone()
        whole = flat[: flat.numel() // 8 * 8].view(torch.int64)
        total += (whole.sum() + flat[whole.numel() * 8 :].sum(dtype=torch.int64)) * (2 * index + 1)
    return int(total.item())


def combined_digest(parts: list[str]) -> str:
    """One digest of the stages' digests, given in grid order."""
    return hashlib.sha256("".join(parts).encode()).hexdigest()


def stage_digest(replica: StageReplica) -> str:
    """sha256 over a stage's parameters, master weights and optimizer state, in layer order."""
    replica.finish_step()
    attributes = replica.attributes
    digest = hashlib.sha256()
    for name, parameter in attributes["module"].named_parameters():
        _add(digest, name, parameter.detach())
    for index, master in enumerate(master_weights(attributes["optimizer"])):
        _add(digest, f"master/{index}", master)
    state = attributes["basic_optimizer"].state_dict()["state"]
    for key in sorted(state, key=str):
        for name in sorted(state[key]):
            _add(digest, f"state/{key}/{name}", state[key][name])
    return digest.hexdigest()


def _add(digest: Any, name: str, value: Any) -> None:
    digest.update(name.encode())
    if isinstance(value, torch.Tensor):
        data = value.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
        digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
        digest.update(data.numpy().tobytes())
    else:
        digest.update(repr(value).encode())
