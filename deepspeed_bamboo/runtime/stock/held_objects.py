"""The optimizer and scheduler objects that a script holds, made to stand for the stage that acts now.

A script is given objects of the stage that its worker began with. Once that stage is elsewhere, they would show and
change nothing that acts. So they become further names of another stage's objects: they share all attributes with
them, and the list and dictionaries of ``param_groups``, which a script may have kept, become that stage's.
"""

from __future__ import annotations

from typing import Any

from deepspeed_bamboo.runtime.stock.description import basic_optimizer
from deepspeed_bamboo.runtime.stock.replica import StageReplica


class HeldObjects:
    """What the script holds of ``replica``, the stage that its worker began with."""

    def __init__(self, replica: StageReplica) -> None:
        replica.held_by_script = True
        self._basic = replica.attributes["basic_optimizer"]
        self._wrapper = replica.attributes["optimizer"]
        self._scheduler = replica.built_scheduler

    def includes(self, optimizer: Any) -> bool:
        """Whether ``optimizer``, or what it wraps, is the script's."""
        return optimizer is not None and basic_optimizer(optimizer) is self._basic

    def can_stand_for(self, replica: StageReplica) -> bool:
        """Whether ``replica`` has objects of the same classes, with as many parameter groups."""
        basic = replica.attributes["basic_optimizer"]
        return (
            _same_class(basic, self._basic)
            and _same_class(replica.attributes["optimizer"], self._wrapper)
            and len(basic.param_groups) == len(self._basic.param_groups)
        )

    def stand_for(self, replica: StageReplica) -> None:
        """From now on what the script holds is what ``replica`` has. What it stood for before goes on by itself."""
        acting, groups = replica.attributes["basic_optimizer"], self._basic.param_groups
        self._basic.param_groups = [dict(group) for group in groups]
        for held, group in zip(groups, acting.param_groups, strict=True):
            contents = dict(group)
            held.clear()
            held.update(contents)
        acting.param_groups = groups
        _share(self._basic, acting)
        _share(self._wrapper, replica.attributes["optimizer"])
        if _same_class(self._scheduler, replica.built_scheduler):
            _share(self._scheduler, replica.built_scheduler)


def _same_class(one: Any, other: Any) -> bool:
    return one is not None and other is not None and one.__class__ is other.__class__


def _share(held: Any, acting: Any) -> None:
    if held is not acting:
        held.__dict__ = acting.__dict__
