"""Policies by name, with the parameters that a scenario gives them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import TypeVar

from pydantic import BaseModel

from ..core.steering import POLICIES
from .clock import to_milliseconds
from .engine import Policy
from .errors import ScenarioError
from .jobs import Job
from .ledger import Ledger
from .own import alike, busy_seconds, effective_mode, least_seconds, overhead_of, planned_grid
from .policies.bamboo import BambooPolicy, BambooRules, Oddities
from .policies.bounds import OnDemandPolicy, OraclePolicy
from .policies.dropping import DroppingPolicy
from .policies.live import LivePolicy
from .policies.planned import PlannedPolicy
from .policies.proactive import ProactivePolicy
from .policies.restarting import CheckpointPolicy, RestartCosts, VarunaPolicy
from .policies.rivals import ReinstantiatingPolicy, ReroutingPolicy
from .progress import Progress
from .scenario import BambooSpec, CheckpointSpec, PoliciesSpec, ReinstantiatingSpec, Scenario

__all__ = ["OWN_POLICIES", "available_policies", "build_policy", "parameters_of"]

_Spec = TypeVar("_Spec")


OWN_POLICIES = ("deepspeed-bamboo-eager", "deepspeed-bamboo", "deepspeed-bamboo-off")
"""This project's, one for each `redundancy.mode`."""


def _specs(policies: PoliciesSpec) -> dict[str, BaseModel | None]:
    """The parameters of every policy, in the order in which they are shown."""
    return {
        "on-demand": policies.on_demand,
        "checkpoint": policies.checkpoint,
        "varuna": policies.varuna,
        "dropping": policies.dropping,
        "bamboo-published": policies.bamboo,
        "bamboo": policies.bamboo,
        **dict.fromkeys(OWN_POLICIES, policies.live),
        "proactive": policies.proactive,
        "oobleck-like": policies.oobleck,
        "checkfree-like": policies.checkfree,
        "recycle-like": policies.recycle,
    }


def parameters_of(scenario: Scenario, policy: str) -> BaseModel | None:
    """A policy's parameters; None for one that has none, as the oracle."""
    return _specs(scenario.policies).get(policy)


def available_policies(scenario: Scenario) -> list[str]:
    """The policies that the scenario has parameters for, in the order in which they are shown."""
    return [*(name for name, spec in _specs(scenario.policies).items() if spec is not None), "oracle"]


def build_policy(job: Job, ledger: Ledger, *, policy: str, seed: int) -> Policy:
    """A policy for one run.

    Raises:
        ScenarioError: the policy is unknown, or the scenario has no parameters for it.
    """
    if policy not in available_policies(job.scenario):
        raise ScenarioError(
            f"policy {policy!r} is unknown, or the scenario has no parameters for it; "
            f"there are {', '.join(available_policies(job.scenario))}"
        )
    policies = job.scenario.policies
    builders: dict[str, Callable[[], Policy]] = {
        "on-demand": lambda: _on_demand(job, ledger),
        "checkpoint": lambda: _checkpoint(job, ledger),
        "varuna": lambda: _varuna(job, ledger),
        "dropping": lambda: _dropping(job, ledger),
        "bamboo-published": lambda: _bamboo(job, ledger, odd=True),
        "bamboo": lambda: _bamboo(job, ledger, odd=False),
        "deepspeed-bamboo-eager": lambda: _live(job, ledger, mode="eager"),
        "deepspeed-bamboo": lambda: _live(job, ledger, mode=None),
        "deepspeed-bamboo-off": lambda: _live(job, ledger, mode="off"),
        "proactive": lambda: _proactive(job, ledger, seed),
        "oobleck-like": lambda: _reinstantiating(job, ledger, policies.oobleck, without_replicas=False),
        "checkfree-like": lambda: _reinstantiating(job, ledger, policies.checkfree, without_replicas=True),
        "recycle-like": lambda: _rerouting(job, ledger),
        "oracle": lambda: OraclePolicy(_progress(job, ledger, 0), ledger, least_seconds=least_seconds(job)),
    }
    return builders[policy]()


def _progress(job: Job, ledger: Ledger, checkpoint_seconds: float, memory_seconds: float = 0.0) -> Progress:
    model = job.scenario.model
    target = None if job.scenario.run.duration_hours is not None or job.trace is not None else model.steps
    return Progress(
        ledger,
        samples_per_step=model.samples_per_step,
        target_steps=target,
        checkpoint_milliseconds=to_milliseconds(checkpoint_seconds),
        memory_milliseconds=to_milliseconds(memory_seconds),
    )


def _on_demand(job: Job, ledger: Ledger) -> Policy:
    spec = _given(job.scenario.policies.on_demand)
    step = math.ceil(spec.step_milliseconds)
    return OnDemandPolicy(_progress(job, ledger, 0), ledger, machines=spec.machines, step_milliseconds=step)


def _restart_costs(spec: CheckpointSpec) -> RestartCosts:
    slowdown = 1.0 + spec.stall_seconds / spec.checkpoint_seconds
    return RestartCosts(spec.restart_seconds, spec.restore_seconds, slowdown, spec.detect_seconds)


def _checkpoint(job: Job, ledger: Ledger) -> Policy:
    spec = _given(job.scenario.policies.checkpoint)
    progress = _progress(job, ledger, spec.checkpoint_seconds)
    return CheckpointPolicy(progress, ledger, costs=_restart_costs(spec), steps=job.plain_steps, stages=spec.stages)


def _varuna(job: Job, ledger: Ledger) -> Policy:
    spec = _given(job.scenario.policies.varuna)
    progress = _progress(job, ledger, spec.checkpoint_seconds)
    stages = range(spec.least_stages, spec.most_stages + 1)
    return VarunaPolicy(progress, ledger, costs=_restart_costs(spec), steps=job.plain_steps, stages=stages)


def _dropping(job: Job, ledger: Ledger) -> Policy:
    spec = _given(job.scenario.policies.dropping)
    return DroppingPolicy(_progress(job, ledger, spec.checkpoint_seconds), ledger, spec=spec, steps=job.plain_steps)


def _bamboo(job: Job, ledger: Ledger, *, odd: bool) -> Policy:
    spec = _given(job.scenario.policies.bamboo)
    rules = BambooRules(
        stages=spec.stages,
        first_rendezvous_seconds=spec.first_rendezvous_seconds,
        rendezvous_seconds=spec.rendezvous_seconds,
        failover_slowdown=spec.failover_slowdown,
        risk_threshold=spec.risk_threshold,
        restore_seconds=spec.restore_seconds,
        oddities=_oddities(spec) if odd else Oddities(),
    )
    progress = _progress(job, ledger, spec.checkpoint_seconds)
    return BambooPolicy(progress, ledger, rules=rules, steps=job.steps, redundancy_share=job.redundancy_share)


def _oddities(spec: BambooSpec) -> Oddities:
    odd = spec.oddities
    return Oddities(
        repeated_timeout=odd.repeated_timeout,
        steps_in_rendezvous=odd.steps_in_rendezvous,
        no_rollback=odd.no_rollback,
        any_loss_slows=odd.any_loss_slows,
        stale_standby=odd.stale_standby,
    )


def _live(job: Job, ledger: Ledger, *, mode: str | None) -> Policy:
    spec, model = _given(job.scenario.policies.live), job.scenario.model
    spec = spec.model_copy(update={"redundancy": effective_mode(spec, mode)})
    planned = planned_grid(job, spec)
    # As the engine: without replicas nothing is kept in memory, and nobody goes back in place.
    goes_back = spec.fatal == "in-place" and spec.redundancy != "off" and planned is not None
    in_memory = spec.memory_checkpoint_seconds if goes_back else 0.0
    progress = _progress(job, ledger, spec.checkpoint_seconds, in_memory)
    coordinate_bytes = model.parameters * model.state_bytes_per_parameter / spec.stages
    if planned is None and spec.copies == 2:
        raise ScenarioError(
            "policies.live.copies 2 is simulated by the engine's own plans alone, and this grid is too large for them, "
            "or policies.live.plans is false; give a smaller grid, or copies 1"
        )
    if planned is None and spec.policy == "proactive":
        raise ScenarioError(
            'policies.live.policy "proactive" is simulated by the engine\'s own plans alone, and this grid is too '
            'large for them, or policies.live.plans is false; give a smaller grid, or policy "fixed"'
        )
    if planned is None:
        return LivePolicy(
            progress,
            ledger,
            spec=spec,
            steps=job.plain_steps,
            coordinate_bytes=coordinate_bytes,
            overhead=overhead_of(spec),
            alike=alike(model),
        )
    return PlannedPolicy(
        progress,
        ledger,
        spec=spec,
        planned=planned[0],
        costs=planned[1],
        coordinate_bytes=coordinate_bytes,
        steering=POLICIES[spec.policy](),
    )


def _proactive(job: Job, ledger: Ledger, seed: int) -> Policy:
    spec, model = _given(job.scenario.policies.proactive), job.scenario.model
    return ProactivePolicy(
        _progress(job, ledger, spec.checkpoint_seconds),
        ledger,
        spec=spec,
        steps=job.plain_steps,
        model_state_bytes=float(model.parameters * model.state_bytes_per_parameter),
        # Not the market's generator: what a policy samples must not change what happens to it.
        generator=random.Random(f"proactive {seed}"),
    )


def _reinstantiating(job: Job, ledger: Ledger, given: ReinstantiatingSpec | None, *, without_replicas: bool) -> Policy:
    spec = _given(given)
    slowdown = 1.0 if without_replicas else 1.0 + spec.stall_seconds / spec.checkpoint_seconds
    return ReinstantiatingPolicy(
        _progress(job, ledger, spec.checkpoint_seconds),
        ledger,
        costs=RestartCosts(spec.reconfigure_seconds, 0.0, slowdown, spec.detect_seconds),
        steps=job.plain_steps,
        stages=range(spec.least_stages, spec.most_stages + 1),
        rollback_seconds=spec.rollback_seconds,
        without_replicas=without_replicas,
    )


def _rerouting(job: Job, ledger: Ledger) -> Policy:
    spec = _given(job.scenario.policies.recycle)
    progress = _progress(job, ledger, spec.checkpoint_seconds)
    return ReroutingPolicy(
        progress, ledger, spec=spec, steps=job.plain_steps, busy_seconds=lambda grid: busy_seconds(job, grid)
    )


def _given(spec: _Spec | None) -> _Spec:
    if spec is None:
        raise ScenarioError("the scenario has no parameters for this policy; add them under policies")
    return spec
