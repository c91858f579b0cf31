"""A PipelineModule that shows a script the layers of all stages that its worker hosts.

The script has one module, made for one stage. After a loss its worker may host more, and an export or a change of
weights that goes through ``parameters()``, ``named_parameters()``, ``buffers()`` or ``state_dict()`` has to reach them
all. DeepSpeed and the plugin, which work on one stage at a time, see that stage alone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from deepspeed.pipe import PipelineModule
from torch import nn

Hosted = Callable[[], Sequence[PipelineModule] | None]
"""The modules of all stages hosted now, in order; None while DeepSpeed or the plugin is at work."""


def show_all_hosted(module: PipelineModule, hosted: Hosted) -> None:
    """From now on ``module``, and every module made like it, shows the layers of all that is ``hosted``."""
    original, scripts_own = type(module), module

    def shown_for(asked: PipelineModule) -> Sequence[PipelineModule]:
        """All that is hosted, for the script's module and those hosted; a shadow shows itself."""
        found = hosted()
        stands_for_all = found is not None and (asked is scripts_own or any(asked is one for one in found))
        return found if found is not None and stands_for_all else [asked]

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

    methods = {"named_modules": named_modules, "named_children": named_children, "state_dict": state_dict}
    view = type(original.__name__, (original,), {**methods, "__module__": original.__module__})
    view.__qualname__ = original.__qualname__
    view.__doc__ = original.__doc__
    module.__class__ = view
