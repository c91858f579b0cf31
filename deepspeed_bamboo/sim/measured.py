"""A job's own measurements, as `ds_bamboo profile` writes them, made what a scenario needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..text_files import UnreadableError, json_of, text_of
from .cost import JobProfile, LayerCost, ProfileError
from .errors import ScenarioError
from .scenario import Scenario, validated

__all__ = ["MEASURED", "is_measured", "measured_profile", "with_measurements"]

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
    try:
        samples = int(data["samples_per_step"]) / (int(data["pipelines"]) * int(data["micro_batches"]))
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
    given["model"] = {
        **model,
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
    # The measured times have the mode's own overhead in them.
    live = {**policies.get("live", {}), "lazy_overhead": 0.0, "pipelines": pipelines, "stages": stages}
    policies["live"] = {**live, **data.get("costs", {})}
    return validated(given, where=f"--profile {path}")
