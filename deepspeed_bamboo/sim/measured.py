"""A job's own measurements, as `ds_bamboo profile` writes them, made what a scenario needs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..text_files import UnreadableError, json_of, text_of
from .cost import JobProfile, LayerCost, ProfileError
from .errors import ScenarioError
from .scenario import LiveSpec, Scenario, validated

__all__ = ["MEASURED", "is_measured", "measured_profile", "said_of_measurements", "with_measurements"]

MEASURED = "measured: "
"""How the source of a model begins whose times a job has measured."""
_LINK = 1.25e9
_KEYS = ("forward", "backward", "pipelines", "micro_batches", "samples_per_step")


def is_measured(data: Any) -> bool:
    """Whether a profile is one of stages that a job has measured, and not one of layers."""
    return isinstance(data, dict) and "forward" in data


def measured_profile(data: dict[str, Any], *, name: str) -> JobProfile:
    """Stages as layers, an iteration's rest as a constant.

    Raises:
        ProfileError: a key is missing, or has no sense.
    """
    costs = data.get("costs", {})
    if not isinstance(costs, dict):
        raise ProfileError(f"{name}: costs is {costs!r}; it is an object, as `ds_bamboo profile` writes it")
    missing = [key for key in _KEYS if key not in data]
    if missing:
        raise ProfileError(f"{name} lacks {missing[0]!r}; let `ds_bamboo profile` write it from a job's event log")
    for key in ("pipelines", "micro_batches", "samples_per_step"):
        if type(data[key]) is not int or data[key] < 1:
            raise ProfileError(
                f"{name}: {key} is {data[key]!r}; it is a whole number from 1, as `ds_bamboo profile` has it"
            )
    try:
        samples = data["samples_per_step"] / (data["pipelines"] * data["micro_batches"])
        passes = list(zip(data["forward"], data["backward"], strict=True))
        layers = tuple(LayerCost(float(forward), float(backward), 0, 0) for forward, backward in passes)
        fixed, handover = float(data.get("fixed_seconds", 0.0)), float(data.get("handover", 0.0))
    except (TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise ProfileError(f"{name}: {error}; let `ds_bamboo profile` write it from a job's event log") from error
    return JobProfile(
        name=name,
        layers=layers,
        micro_batch_samples=max(1, round(samples)),
        link_bytes_per_second=_LINK,
        fixed_seconds=fixed,
        handover_seconds=handover,
    )


def with_measurements(scenario: Scenario, path: Path) -> Scenario:
    """The scenario with the model, the grid and the costs that a job has measured; other policies get the same stages.

    Raises:
        ScenarioError: the file can't be read, is no such profile, or has costs that make no sense.
    """
    try:
        data = json_of(text_of(path))
    except UnreadableError as error:
        raise ScenarioError(f"--profile {path}: {error}; give a file of ds_bamboo profile") from error
    if not is_measured(data):
        raise ScenarioError(f"--profile {path}: no measurements of a job; give a file of ds_bamboo profile")
    try:
        profile = measured_profile(data, name=path.name)
    except ProfileError as error:
        raise ScenarioError(f"--profile {path}: {error}") from error
    stages, pipelines = len(profile.layers), int(data["pipelines"])
    given = scenario.model_dump(exclude_none=True)
    model = {key: value for key, value in given["model"].items() if key not in ("table", "micro_batch_samples")}
    ran = {name: data[name] for name in ("mode", "alike") if name in data}
    given["model"] = {
        **model,
        **_state(ran),
        "measured": ran,
        "name": path.name,
        "source": f"{MEASURED}{path}",
        "samples_per_step": data["samples_per_step"],
        "profile": str(path.resolve()),
        "most_pipelines": max(pipelines, int(model.get("most_pipelines", 1))),
    }
    policies = given["policies"]
    for name in ("checkpoint", "dropping", "bamboo"):
        if name in policies:
            policies[name]["stages"] = stages
    for name in ("varuna", "proactive"):
        if name in policies:
            policies[name] |= {"least_stages": 1, "most_stages": stages}
    if "varuna" in policies:
        policies["varuna"]["stages"] = stages
    policies.pop("on_demand", None)  # Its step time is another machine's.
    live = {**LiveSpec(pipelines=1, stages=1).model_dump(exclude_none=True), **policies.get("live", {})}
    live |= {**_overheads(live, data), "pipelines": pipelines, "stages": stages}
    policies["live"] = {**live, **data.get("costs", {})}
    return validated(given, where=f"--profile {path}")


def _state(ran: dict[str, Any]) -> dict[str, Any]:
    """What the model's precision and ZeRO are to the simulation: whether pipelines can give each other their state."""
    if ran.get("alike") is None:
        return {}
    return {"precision": "fp32", "zero_stage": 0 if ran["alike"] else 1}


def _overheads(live: dict[str, Any], data: dict[str, Any]) -> dict[str, float]:
    """What redundancy adds to a step besides what is in the measured times: that of the mode that the job had."""
    first: float = live["lazy_overhead"]
    second = live.get("second_overhead", first)
    if data.get("mode") == "off":
        return {"second_overhead": second}
    measured_eager = data.get("mode") == "eager"
    eager = 0.0 if measured_eager else max(0.0, (1.0 + live.get("eager_overhead", first)) / (1.0 + first) - 1.0)
    return {
        "lazy_overhead": 0.0,
        "eager_overhead": eager,
        "second_overhead": 0.0 if data.get("copies") == 2 else second,
    }


def said_of_measurements(scenario: Scenario, *, given: Mapping[str, bool], others: bool) -> list[str]:
    """In sentences: what figures by --profile rest on that the profile doesn't say. None without --profile.

    Args:
        scenario: as simulated.
        given: whether --steps and --parameters are.
        others: whether policies are simulated that keep no replicas.
    """
    model, live = scenario.model, scenario.policies.live
    if model.measured is None or live is None:
        return []
    rest = [f"policies.live.state_memory_bytes {live.state_memory_bytes:.3g} (state that a worker has room for)"]
    if not given.get("parameters"):
        rest.insert(0, f"{model.parameters:,} parameters (--parameters: moves, memory)")
    if not given.get("steps") and model.steps is not None:
        rest.insert(0, f"{model.steps:,} steps (--steps)")
    if model.measured.alike is None:
        rest.append(f"model.precision {model.precision} and model.zero_stage {model.zero_stage} (who has whose state)")
    found = [f"of your job the profile doesn't say, and the preset or scenario does: {', '.join(rest)}"]
    mode = model.measured.mode
    if mode == "off":
        found.append(f"the job ran in mode off; its replicas would add {live.lazy_overhead:.1%}, which is not measured")
    elif others:
        ran = f"the job ran in mode {mode}" if mode else "the profile doesn't say in which mode the job ran, so in lazy"
        found.append(
            f"{ran}: what its replicas cost is in the measured times, so also those pay it here that keep none (all "
            "other policies, and mode off); a profile of a job in mode off has nothing of it"
        )
    return found
