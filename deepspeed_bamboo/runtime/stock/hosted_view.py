"""A PipelineModule that shows a script the layers of all stages that its worker hosts.

The script has one module, made for one stage. After a loss its worker may host more, and an export or a change of
weights that goes through ``parameters()``, ``named_parameters()``, ``buffers()`` or ``state_dict()`` has to reach them
all. DeepSpeed and the plugin, which work on one stage at a time, see that stage alone.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from deepspeed.pipe import PipelineModule
from torch import nn

Hosted = Callable[[], Sequence[PipelineModule] | None]
"""The modules of all stages hosted now, in order; None while DeepSpeed or the plugin is at work."""


# Names of threads that are not the script's: the plugin's own, and those of autograd, which Python only hears of.
_OTHERS_THREADS = ("bamboo-", "Dummy-")


def in_thread_of_script() -> bool:
    """Whether this is a thread that the script has started, to save weights in it, say."""
    current = threading.current_thread()
    return current is not threading.main_thread() and not current.name.startswith(_OTHERS_THREADS)


def show_all_hosted(module: PipelineModule, hosted: Hosted) -> None:
    """From now on ``module``, and every module made like it, shows the layers of all that is ``hosted``."""
    original, scripts_own = type(module), module

    def shown_for(asked: PipelineModule) -> Sequence[PipelineModule]:
        """All that is hosted, for the script's module and those hosted; a shadow shows itself.

        A thread of the script's that reads ``engine.module`` may get whatever the engine works on, and means all.
        """
        found = hosted()
        if found is None:
            return [asked]
        stands_for_all = asked is scripts_own or any(asked is one for one in found) or in_thread_of_script()
        return found if stands_for_all else [asked]

    def named_modules(
        self: PipelineModule, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        seen: set[nn.Module] = set() if memo is None else memo
        for shown in shown_for(self):
            yield from original.named_modules(shown, seen, prefix, remove_duplicate)

    def named_children(self: PipelineModule) -> Iterator[tuple[str, nn.Module]]:
        """Also what ``children()``, ``apply()``, ``train()`` and ``to()`` go by."""
        for shown in shown_for(self):
            yield from original.named_children(shown)

    def state_dict(self: PipelineModule, *args: Any, **kwargs: Any) -> Any:
        result: OrderedDict[str, Any] | None = None
        for shown in shown_for(self):
            part = original.state_dict(shown, *args, **kwargs)
            if result is None:
                result = part
            else:
                result.update(part)
        return OrderedDict() if result is None else result

    def load_state_dict(self: PipelineModule, state_dict: Mapping[str, Any], *args: Any, **options: Any) -> Any:
        return _load(original, shown_for(self), state_dict, *args, **options)

    methods: dict[str, Callable[..., Any]] = {
        "named_modules": named_modules,
        "named_children": named_children,
        "state_dict": state_dict,
        "load_state_dict": load_state_dict,
    }
    view = type(original.__name__, (original,), {**methods, "__module__": original.__module__})
    view.__qualname__ = original.__qualname__
    view.__doc__ = original.__doc__
    module.__class__ = view


def _load(
    kind: type[PipelineModule],
    parts: Sequence[PipelineModule],
    state_dict: Mapping[str, Any],
    strict: bool = True,
    **options: Any,
) -> Any:
    """As torch's ``load_state_dict``; each stage takes what is its own of what ``state_dict()`` gave of all.

    Raises RuntimeError, as torch does, where something is missing or left over, and ``strict``.
    """
    if len(parts) == 1:
        return kind.load_state_dict(parts[0], state_dict, strict, **options)
    missing: list[str] = []
    known: set[str] = set()
    for shown in parts:
        names = kind.state_dict(shown).keys()
        known.update(names)
        own = {name: value for name, value in state_dict.items() if name in names}
        found = kind.load_state_dict(shown, own, strict=False, **options)
        missing += found.missing_keys
    unexpected = [name for name in state_dict if name not in known]
    if strict and (missing or unexpected):
        raise RuntimeError(
            f"state_dict for the {len(parts)} stages on this worker lacks {missing} and has, besides, {unexpected}"
        )
    return type(found)(missing, unexpected)
