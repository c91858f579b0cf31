"""What rivals are charged: two sets of assumptions, generous and fair; `simulate --rivals` chooses one.

- Restart from a checkpoint: 25 s or 300 s. Parcae's model has 21.6 to 28.9 s, and stock DeepSpeed took 26.6 s on one
  machine (docs/results.md); where machines, images and groups have to come up again it is minutes (DLRover: two).
- Detecting a loss: free, or 3 s for all, a lease as this project's own.
- Checkpoints: every 60 s, or every 600 s for all, which is this project's default. A delay of 1 s each for
  checkpoint, varuna and oobleck-like alone; the others and this project make them for nothing.
- Restarts of this project's own (a fatal loss, machines that mode off takes in) stay at 60 + 14 s, also with `fair`.
- Proactive migration: 1.6, 7.5 and 9.3 s. Parcae (NSDI'24) has 1.6 s, 4 to 11 s and 5.5 to 13 s; these are the middles.
- Oobleck- and CheckFree-like reconfiguration: 10 s or 30 s. Assumed.
- ReCycle-like rerouting: 1 s or 5 s. Assumed.

On demand is charged the step time that the table or profile gives for as many machines, like everyone else.
"""

from __future__ import annotations

from typing import Any, Literal

from .errors import ScenarioError
from .jobs import build_job
from .policies.restarting import best_grid
from .scenario import Scenario, validated

__all__ = ["RIVAL_COSTS", "RivalCosts", "with_rival_costs"]

RivalCosts = Literal["generous", "fair"]
RIVAL_COSTS: tuple[RivalCosts, ...] = ("generous", "fair")

_RESTORE = 14.0


def with_rival_costs(scenario: Scenario, costs: RivalCosts) -> Scenario:
    """The scenario with all rivals in it, charged as said above; this project's own costs stay.

    With `fair` this project's checkpoints are as often as the rivals'. What a scenario says of the three added rivals
    besides these costs stays.

    Raises:
        ScenarioError: nothing says how many stages the added rivals have.
    """
    fair = costs == "fair"
    data = scenario.model_dump(exclude_none=True)
    policies: dict[str, Any] = data["policies"]
    checkpoints = {"checkpoint_seconds": 600.0 if fair else 60.0}
    detect = {"detect_seconds": 3.0 if fair else 0.0}
    restart = {"restart_seconds": (300.0 if fair else 25.0) - _RESTORE, "restore_seconds": _RESTORE}
    varuna = policies.get("varuna", {})
    stages = varuna.get("stages", policies.get("checkpoint", {}).get("stages"))
    if stages is None:
        raise ScenarioError(
            f"--rivals {costs}: the rivals have as many stages as policies.varuna or policies.checkpoint, and the "
            "scenario has neither; add one of them"
        )
    between = {"least_stages": varuna.get("least_stages", stages), "most_stages": varuna.get("most_stages", stages)}
    for name in ("checkpoint", "varuna"):
        if name in policies:
            policies[name] |= restart | checkpoints | detect
    if "dropping" in policies:
        policies["dropping"] |= checkpoints | detect
    if "bamboo" in policies:
        policies["bamboo"] |= checkpoints
    if "proactive" in policies:
        migrations = {"intra_stage_seconds": 1.6, "inter_stage_seconds": 7.5, "pipeline_seconds": 9.3}
        policies["proactive"] |= migrations | checkpoints | detect
    rollback = {"rollback_seconds": restart["restart_seconds"] + _RESTORE}
    again = {"reconfigure_seconds": 30.0 if fair else 10.0}
    reroute = {"reroute_seconds": 5.0 if fair else 1.0}
    for name in ("oobleck", "checkfree"):
        policies[name] = between | policies.get(name, {}) | again | rollback | checkpoints | detect
    policies["recycle"] = {"stages": stages} | policies.get("recycle", {}) | reroute | restart | checkpoints | detect
    if fair and "live" in policies:
        policies["live"] |= checkpoints
    charged = validated(data, where=f"--rivals {costs}")
    return _on_demand_alike(charged)


def _on_demand_alike(scenario: Scenario) -> Scenario:
    """On demand with the step time that everybody else would have on its machines."""
    on_demand, varuna = scenario.policies.on_demand, scenario.policies.varuna
    if on_demand is None or varuna is None or scenario.model.table == ():
        return scenario
    steps = build_job(scenario.model_copy(update={"run": scenario.run.model_copy(update={"duration_hours": 1.0})}))
    stages = range(varuna.least_stages, varuna.most_stages + 1)
    found = best_grid(steps.plain_steps, machines=on_demand.machines, stages=stages)
    if found is None:
        return scenario
    grid, seconds = found
    same = on_demand.model_copy(update={"step_milliseconds": seconds * 1000.0, "grid": tuple(grid)})
    return scenario.model_copy(update={"policies": scenario.policies.model_copy(update={"on_demand": same})})
