"""Runs that many scenarios have in common, simulated once: a policy's run depends on its own parameters alone."""

from __future__ import annotations

import json
from collections.abc import Sequence

from .build import OWN_POLICIES, parameters_of
from .jobs import Job
from .results import RunResult, Summary
from .runner import run_one

__all__ = ["SharedRuns"]

_OF_OWN_STATE = ("precision", "zero_stage")
"""What says which pipelines have the same state: no other policy asks for it."""


class SharedRuns:
    """Remembers runs by all that they depend on, so that a table of scenarios that differ a little takes less time."""

    def __init__(self) -> None:
        self._known: dict[str, RunResult] = {}
        self.simulated = 0

    def summaries(self, job: Job, *, machines: str, policies: Sequence[str], seeds: Sequence[int]) -> list[Summary]:
        """What :func:`run_seeds` returns.

        Args:
            job: what to run.
            machines: a name for the job's trace; the same name stands for the same trace, "" for none.
            policies: some of available_policies.
            seeds: of the runs.
        """
        found = []
        for policy in policies:
            depends_on = _depends_on(job, machines, policy)
            found.append(Summary(policy, tuple(self._run(job, policy, seed, depends_on) for seed in seeds)))
        return found

    def _run(self, job: Job, policy: str, seed: int, depends_on: str) -> RunResult:
        key = f"{seed} {depends_on}"
        if key not in self._known:
            self.simulated += 1
            self._known[key] = run_one(job, policy=policy, seed=seed)
        return self._known[key]


def _depends_on(job: Job, machines: str, policy: str) -> str:
    scenario = job.scenario
    model = scenario.model.model_dump(mode="json")
    if policy not in OWN_POLICIES:
        model = {name: value for name, value in model.items() if name not in _OF_OWN_STATE}
    parameters = parameters_of(scenario, policy)
    parts = {
        "model": model,
        "market": scenario.market.model_dump(mode="json"),
        "run": scenario.run.model_dump(mode="json"),
        "machines": machines,
        "policy": policy,
        "parameters": None if parameters is None else parameters.model_dump(mode="json"),
        # The oracle's bound, and what a stage computes, come from the profile that is fitted for this grid.
        "live": None if scenario.policies.live is None else scenario.policies.live.model_dump(mode="json"),
    }
    return json.dumps(parts, sort_keys=True)
