"""Makes the optimizer of another stage as the script makes its own, with the groups that the stage's owner has.

A script gives DeepSpeed an entry of the configuration, a function from parameters to an optimizer, or an optimizer. The
first two make one for any stage. An optimizer object is made again: its class is called with the owner's groups and
with what the object says it was called with, and whether that gives the same is tried at the start with the stage
that this worker has.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from deepspeed_bamboo.errors import ConfigError
from deepspeed_bamboo.runtime.stock.plain_forms import Parts, form_of, is_known

Maker = Callable[[Any], Any]
Group = dict[str, Any]
_NOT_COMPARED = frozenset({"state", "param_groups", "defaults", "opt_id"})  # the last: DeepSpeedCPUAdam's, by count
_KEPT_AS = {"adamw_mode": "adam_w_mode"}  # DeepSpeedCPUAdam's argument, and where it keeps it


def maker_for(source: Any, *, configured: Maker, described: Mapping[str, Any] | None, module: torch.nn.Module) -> Any:
    """What ``DeepSpeedEngine._configure_optimizer`` is to be given for a replica in ``module``.

    ``source`` is what the script gave, None for the configuration's entry, from which ``configured`` makes one;
    ``described`` is the owner's optimizer (``description.py``), None where the groups are those that ``source`` makes.
    Raises LookupError, from the maker, where an object can't be made again, and ConfigError where a function makes one
    for other parameters than it was given.
    """
    if described is None:
        return _of_its_own(source, module) if callable(source) else source
    parts = Parts.of(module)

    def make(parameters: Any) -> Any:
        groups = [
            {"params": [parts.tensors[name] for name in names], **_known(values)}
            for names, values in zip(described["groups"], described["made"], strict=True)
        ]
        if isinstance(source, torch.optim.Optimizer):
            return made_again(source, groups)
        made = (configured if source is None else source)(list(parameters))
        if _grouped(made.param_groups) == _grouped(groups):
            # The owner's may have had values of their own, which a scheduler reads as it is made.
            for own, group in zip(_filled(made.param_groups), _filled(groups), strict=True):
                own.update({key: value for key, value in group.items() if key != "params"})
            return made
        if source is None:
            return configured(groups)
        made.param_groups.clear()
        for group in groups:
            made.add_param_group(group)
        return made

    return make


def _known(values: Mapping[str, Any]) -> Group:
    """Of a group's values those that are plain. Others (a rate that is a tensor) are as the maker makes them."""
    return {key: form[1] for key, form in values.items() if form[0] == "plain"}


def _of_its_own(source: Maker, module: torch.nn.Module) -> Maker:
    def make(parameters: Any) -> Any:
        made = source(parameters)
        own = {id(parameter) for parameter in module.parameters()}
        others = [p for group in made.param_groups for p in group["params"] if id(p) not in own]
        if others:
            raise ConfigError(
                f"the function given to initialize as optimizer makes one for {len(others)} parameters that are not "
                "among those that it is called with: it is called once for each stage that this worker hosts, with "
                "that stage's. Make the groups of what it is called with (by shape, or an attribute of parameters), or "
                "pass the groups as model_parameters"
            )
        return made

    return make


def made_again(optimizer: torch.optim.Optimizer, groups: Sequence[Group]) -> torch.optim.Optimizer:
    """Another optimizer of the same class, for ``groups``. Raises LookupError where its class can't be called so."""
    kind: Any = type(optimizer)
    accepted = inspect.signature(kind.__init__).parameters
    arguments = {
        name: optimizer.defaults.get(name, vars(optimizer).get(kept))
        for name, kept in ((name, _KEPT_AS.get(name, name)) for name in list(accepted)[2:])
        if name in optimizer.defaults or kept in vars(optimizer)
    }
    try:
        return kind([dict(group) for group in groups], **arguments)  # type: ignore[no-any-return]
    except (TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise LookupError(f"{kind.__name__} can't be made again: {error}") from error


def problem_with(optimizer: Any) -> str | None:
    """Why an optimizer object can't be made again for another stage: what its own groups would give instead."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        return None
    try:
        again = made_again(optimizer, optimizer.param_groups)
    except LookupError as error:
        return str(error)
    nothing = Parts({}, {})
    for name, value in vars(optimizer).items():
        form = form_of(value, nothing)
        plain = name not in _NOT_COMPARED and is_known(form) and form[0] == "plain"
        if plain and repr(form_of(vars(again).get(name), nothing)) != repr(form):
            return f"its {name} is {value!r:.60}, and would be {vars(again).get(name)!r:.60}"
    return None


def _filled(groups: Sequence[Group]) -> list[Group]:
    return [group for group in groups if group["params"]]


def _grouped(groups: Sequence[Group]) -> list[list[int]]:
    return [[id(parameter) for parameter in group["params"]] for group in _filled(groups)]
