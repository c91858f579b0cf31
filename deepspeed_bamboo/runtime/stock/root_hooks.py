"""Hooks that a script puts on its PipelineModule itself, or takes from it, after ``initialize``.

A script has one PipelineModule, a worker one for each stage and each shadow. The scripts of all workers do the same, so
what one does there is done to all of its own worker's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepspeed_bamboo.runtime.stock.hosting import StageHost
from deepspeed_bamboo.runtime.stock.likeness import register_on_module
from deepspeed_bamboo.runtime.stock.root_values import module_of_script
from deepspeed_bamboo.runtime.stock.script_hooks import MODULE_HOOKS, hook_options, hooks_of, keys_of_hooks


class RootHooks:
    """For one worker; see the module."""

    def __init__(self, host: StageHost) -> None:
        self._host = host
        self._source: Any = None
        self._known: Mapping[str, list[int]] = {}
        self.carry()

    def carry(self) -> None:
        """Do to the other modules of this worker what the script has done to its own since the last call."""
        source = module_of_script(self._host)
        now = {kind: keys_of_hooks(source, kind) for kind in MODULE_HOOKS}
        if source is not None and source is self._source and now != self._known:
            for replica in self._host.built():
                if replica.module is not source:
                    self._follow(source, replica.module, now)
        self._source, self._known = source, now

    def _follow(self, source: Any, module: Any, there: Mapping[str, list[int]]) -> None:
        for kind, now in there.items():
            before, own = self._known[kind], keys_of_hooks(module, kind)
            if len(own) != len(before):
                continue  # made since then, with the hooks that the script's has now
            for key, its in zip(before, own, strict=True):
                if key not in now:
                    del getattr(module, kind)[its]
            pairs = zip(now, hooks_of(source, kind), hook_options(source, kind), strict=True)
            for key, hook, options in pairs:
                if key not in before:
                    register_on_module(module, kind, hook, options)
