"""Which hooks a stage has of the script's: on its modules, on its parameters, and on the PipelineModule itself."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

PARAMETER_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
MODULE_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
# Options of hooks, and where torch notes them.
_OPTIONS = {
    "_forward_hooks": {"with_kwargs": "_forward_hooks_with_kwargs", "always_call": "_forward_hooks_always_called"},
    "_forward_pre_hooks": {"with_kwargs": "_forward_pre_hooks_with_kwargs"},
}
# DeepSpeed's and this package's own hooks and attributes come with the engine, on every replica.
_NOT_THE_SCRIPTS = ("deepspeed.", "deepspeed_bamboo.runtime", "torch.")
# ... unlike those by which torch has a script change a layer: pruning, weight norm.
_BY_THE_SCRIPT = ("torch.nn.utils.",)
LOSS = "loss_fn"


@dataclass(frozen=True)
class ScriptHook:
    """One of them: number ``place`` of its ``kind`` at ``path``, under ``key`` of ``registry``."""

    path: str
    kind: str
    place: int
    registry: dict[int, Any]
    key: int

    @property
    def function(self) -> Any:
        """What is called."""
        return self.registry[self.key]

    @property
    def name(self) -> str:
        """For messages."""
        return f"hook {self.place} of {self.path or 'the PipelineModule'}"

    def replace(self, function: Any) -> None:
        """Call ``function`` from now on."""
        if function is not self.registry[self.key]:
            self.registry[self.key] = function


def is_of_stage(module: torch.nn.Module, path: str) -> bool:
    """Whether what is at ``path`` of a stage's PipelineModule belongs to that stage.

    All stages of a worker have one loss function, which only the last stage of a pipeline calls.
    """
    last = getattr(module, "stage_id", None) == getattr(module, "num_stages", 0) - 1
    return bool(path) and (last or path.partition(".")[0] != LOSS)


def hooks_of(holder: Any, kind: str) -> list[Any]:
    """The hooks of one kind that the script, or a layer's class, has registered, in order."""
    return [getattr(holder, kind)[key] for key in keys_of_hooks(holder, kind)]


def keys_of_hooks(holder: Any, kind: str) -> list[int]:
    """Under which keys torch has the hooks of :func:`hooks_of`, in their order."""
    return _script_keys(getattr(holder, kind, None) or {})


def hook_options(holder: Any, kind: str) -> list[dict[str, bool]]:
    """The options with which the hooks of :func:`hooks_of` were registered, in their order; none for the default."""
    given = {option: getattr(holder, where) for option, where in _OPTIONS.get(kind, {}).items()}
    return [{option: True for option, keys in given.items() if key in keys} for key in keys_of_hooks(holder, kind)]


def is_not_the_scripts(hook: Any) -> bool:
    source = source_of(hook)
    return source.startswith(_NOT_THE_SCRIPTS) and not source.startswith(_BY_THE_SCRIPT)


def source_of(value: Any) -> str:
    """The module that a function is from, or the class of anything else."""
    function = value.__func__ if isinstance(value, types.MethodType) else getattr(value, "func", value)
    return str(getattr(function, "__module__", None) or type(value).__module__)


def hooks_of_stage(module: torch.nn.Module) -> list[ScriptHook]:
    """All, in an order that is the same for every replica of the stage."""
    found: list[ScriptHook] = []
    for path, part in module.named_modules():
        if not path or is_of_stage(module, path):
            for kind in MODULE_HOOKS:
                if part.__dict__.get(kind):
                    found += _of(path, kind, part.__dict__[kind])
    for name, parameter in module.named_parameters():
        if not is_of_stage(module, name):
            continue
        for kind in PARAMETER_HOOKS:
            registry = getattr(parameter, kind, None)
            if registry:
                found += _of(name, kind, registry)
    return found


def _of(path: str, kind: str, registry: dict[int, Any]) -> list[ScriptHook]:
    return [ScriptHook(path, kind, place, registry, key) for place, key in enumerate(_script_keys(registry))]


def _script_keys(registry: Mapping[int, Any]) -> list[int]:
    return [key for key, hook in registry.items() if not is_not_the_scripts(hook)]
