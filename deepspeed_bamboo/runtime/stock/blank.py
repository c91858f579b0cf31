"""Building layers without drawing the initial weights that are overwritten at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_DRAWING = frozenset({"normal_", "uniform_", "trunc_normal_", "random_", "bernoulli_", "log_normal_", "exponential_"})
_INITIALIZERS = "torch.nn.init"


class BlankParameters(TorchFunctionMode):  # type: ignore[misc]
    """Inside the block, what would initialize a parameter in place leaves it as it is: whatever its memory held.

    For replicas whose every parameter is copied from its owner afterwards: drawing 128 million normal numbers takes
    a second or more. Only parameters are left out. What is drawn into any other tensor may be no part of the state
    that is copied, such as a fixed projection that a layer keeps as an attribute.
    """

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """The parameter unchanged for an initializer of it, else the result of ``function``."""
        named = kwargs or {}
        target = args[0] if args else named.get("tensor")
        if isinstance(target, torch.nn.Parameter) and _initializes(function):
            return target
        return function(*args, **named)


def _initializes(function: Callable[..., Any]) -> bool:
    name = getattr(function, "__name__", "")
    return name in _DRAWING or (getattr(function, "__module__", "") == _INITIALIZERS and name.endswith("_"))
