"""What a step costs: a closed-form model of a pipeline-parallel job, from per-layer times.

A profile says what each layer takes for one micro-batch; the engine can record it (`bamboo.profile`) or it is written
by hand. From it follow the step time of any grid, and of workers that host several coordinates. The model is the
usual one of synchronous 1F1B pipelines (PipeDream-Flush, Narayanan et al. 2021, section 2.2): the slowest stage
works through its micro-batches without a gap, after the pipeline has filled and before it has drained. Transfers
between stages are hidden behind compute except while filling and draining, or where they take longer than it.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from typing import Any

from ..text_files import UnreadableError, json_of

__all__ = [
    "JobProfile",
    "LayerCost",
    "ProfileError",
    "coordinate_state_bytes",
    "hosted_step_seconds",
    "profile_from_json",
    "profile_to_json",
    "reduce_seconds",
    "redundant_forward_overhead",
    "split_layers",
    "step_seconds",
    "total_work_seconds",
]


_LONGEST_SECONDS = 1e6
_SECONDS_RULE = f"seconds are from 0 to {_LONGEST_SECONDS:,.0f} (eleven days); measure them again"


class ProfileError(ValueError):
    """A profile, or a grid asked of it, breaks a rule; the message says value, rule and remedy."""


@dataclass(frozen=True)
class LayerCost:
    """One layer, for one micro-batch on one worker.

    Attributes:
        forward_seconds: its forward.
        backward_seconds: its backward, with the recomputation if activations are checkpointed.
        parameters: how many it has.
        output_bytes: of the tensor that the next layer receives.
    """

    forward_seconds: float
    backward_seconds: float
    parameters: int
    output_bytes: int


@dataclass(frozen=True)
class JobProfile:
    """A job, as its step time depends on it.

    Attributes:
        name: for messages.
        layers: in order; the smallest unit that a stage is made of.
        micro_batch_samples: samples in one micro-batch.
        link_bytes_per_second: between the workers of two neighbouring stages, one way.
        reduce_bytes_per_second: of each worker in an all-reduce; None is the same as the link.
        link_latency_seconds: of one message.
        gradient_bytes_per_parameter: as it is reduced.
        state_bytes_per_parameter: parameter, master copy and moments, as a replica holds them.
        optimizer_seconds_per_parameter: of the update.
        hidden_fraction: the part of redundant forwards that bubbles hide, 0 to 1.
        fixed_seconds: of every step, whatever the grid.
        handover_seconds: until a tensor is on another worker; None: by link and latency.
    """

    name: str
    layers: tuple[LayerCost, ...]
    micro_batch_samples: int
    link_bytes_per_second: float
    reduce_bytes_per_second: float | None = None
    link_latency_seconds: float = 0.0
    gradient_bytes_per_parameter: int = 4
    state_bytes_per_parameter: int = 16
    optimizer_seconds_per_parameter: float = 0.0
    hidden_fraction: float = 0.0
    fixed_seconds: float = 0.0
    handover_seconds: float | None = None

    def __post_init__(self) -> None:
        if not self.layers:
            raise ProfileError(f"profile {self.name}: layers is empty; give at least one layer")
        if self.micro_batch_samples < 1:
            raise ProfileError(f"profile {self.name}: micro_batch_samples {self.micro_batch_samples}: give 1 or more")
        if not self.link_bytes_per_second > 0:
            raise ProfileError(f"profile {self.name}: link_bytes_per_second is not above 0; give the bandwidth")
        if self.reduce_bytes_per_second is not None and not self.reduce_bytes_per_second > 0:
            raise ProfileError(f"profile {self.name}: reduce_bytes_per_second is not above 0; give it or leave it out")
        if not 0.0 <= self.hidden_fraction <= 1.0:
            raise ProfileError(f"profile {self.name}: hidden_fraction is {self.hidden_fraction}; it lies in [0, 1]")
        for name in ("fixed_seconds", "handover_seconds"):
            value = getattr(self, name)
            if value is not None and not 0.0 <= value <= _LONGEST_SECONDS:
                raise ProfileError(f"profile {self.name}: {name} is {value}; {_SECONDS_RULE}")
        for index, layer in enumerate(self.layers):
            if min(layer.forward_seconds, layer.backward_seconds, layer.parameters, layer.output_bytes) < 0:
                raise ProfileError(f"profile {self.name}: layer {index} has a negative value; measure it again")
            for seconds in (layer.forward_seconds, layer.backward_seconds):
                if not seconds <= _LONGEST_SECONDS:
                    raise ProfileError(f"profile {self.name}: layer {index} takes {seconds} s; {_SECONDS_RULE}")
        if not total_micro_batch_seconds(self) > 0:
            raise ProfileError(f"profile {self.name}: its layers take no time at all; measure them again")


def total_micro_batch_seconds(profile: JobProfile) -> float:
    """Forward and backward of all layers for one micro-batch."""
    return math.fsum(layer.forward_seconds + layer.backward_seconds for layer in profile.layers)


def total_work_seconds(profile: JobProfile, *, samples_per_step: int) -> float:
    """Compute of one step, all layers and micro-batches, were one worker to do it."""
    return total_micro_batch_seconds(profile) * _micro_batches(profile, samples_per_step, 1)


def redundant_forward_overhead(profile: JobProfile) -> float:
    """What eager FRC adds to a step's compute, as a fraction: the part of all forwards that no bubble hides."""
    forward = math.fsum(layer.forward_seconds for layer in profile.layers)
    return (1.0 - profile.hidden_fraction) * forward / total_micro_batch_seconds(profile)


def split_layers(profile: JobProfile, *, stages: int) -> tuple[range, ...]:
    """Contiguous layers for each stage, such that the slowest stage is as fast as can be.

    Returns:
        `stages` ranges of layer indices, none empty.

    Raises:
        ProfileError: there are fewer layers than stages, or no stage is asked for.
    """
    if not 1 <= stages <= len(profile.layers):
        raise ProfileError(
            f"{stages} stages for the {len(profile.layers)} layers of {profile.name}: "
            "a stage has at least one layer; ask for fewer stages, or 1"
        )
    return _split(tuple(layer.forward_seconds + layer.backward_seconds for layer in profile.layers), stages)


@lru_cache(maxsize=1024)
def _split(times: tuple[float, ...], stages: int) -> tuple[range, ...]:
    prefix = [0.0]
    for time in times:
        prefix.append(prefix[-1] + time)
    # best[k] = slowest stage of the first k layers in the stages so far; cut[s][k] = where the last stage begins.
    best = prefix[:]
    cuts: list[list[int]] = []
    for stage in range(1, stages):
        following = [math.inf] * len(prefix)
        cut = [0] * len(prefix)
        for end in range(stage + 1, len(prefix)):
            for begin in range(stage, end):
                slowest = max(best[begin], prefix[end] - prefix[begin])
                if slowest < following[end]:
                    following[end], cut[end] = slowest, begin
        best = following
        cuts.append(cut)
    ends = [len(times)]
    for cut in reversed(cuts):
        ends.append(cut[ends[-1]])
    bounds = [0, *reversed(ends)]
    return tuple(range(begin, end) for begin, end in itertools.pairwise(bounds))


def step_seconds(profile: JobProfile, *, pipelines: int, stages: int, samples_per_step: int) -> float:
    """One step on a grid with one worker a coordinate.

    Raises:
        ProfileError: the grid doesn't fit the layers or the batch.
    """
    return hosted_step_seconds(
        profile, pipelines=pipelines, stages=stages, most_hosted=1, samples_per_step=samples_per_step
    )


def hosted_step_seconds(
    profile: JobProfile, *, pipelines: int, stages: int, most_hosted: int, samples_per_step: int
) -> float:
    """One step when the most loaded worker hosts `most_hosted` coordinates of the grid.

    That worker is taken to host the slowest stage so many times, and filling and draining are taken to overlap with
    nothing: both err towards a longer step.

    Args:
        profile: the job.
        pipelines: D of the grid.
        stages: P of the grid.
        most_hosted: coordinates on the most loaded worker, 1 to D x P.
        samples_per_step: the global batch.

    Returns:
        Seconds from the first forward to the end of the update.
    """
    micro_batches = _micro_batches(profile, samples_per_step, pipelines)
    parts = split_layers(profile, stages=stages)
    stage_times = [_range_seconds(profile, part) for part in parts]
    transfers = [_transfer_seconds(profile, profile.layers[part[-1]].output_bytes) for part in parts[:-1]]
    # In the steady state a message leaves each way per micro-batch; it is hidden unless longer than the compute.
    slowest = max(stage_times) * most_hosted
    steady = max(slowest, max(transfers, default=0.0) * most_hosted)
    fill = math.fsum(stage_times) - max(stage_times) + 2.0 * math.fsum(transfers)
    largest = max(sum(profile.layers[index].parameters for index in part) for part in parts) * most_hosted
    update = largest * profile.optimizer_seconds_per_parameter
    return micro_batches * steady + fill + _reduce_seconds(profile, largest, pipelines) + update + profile.fixed_seconds


def coordinate_state_bytes(profile: JobProfile, *, stages: int) -> int:
    """Bytes of parameters and optimizer state of the largest stage: what a shadow's copy moves."""
    parts = split_layers(profile, stages=stages)
    largest = max(sum(profile.layers[index].parameters for index in part) for part in parts)
    return largest * profile.state_bytes_per_parameter


def _micro_batches(profile: JobProfile, samples_per_step: int, pipelines: int) -> float:
    """Micro-batches that each pipeline works through, at least one."""
    if pipelines < 1 or samples_per_step < 1:
        raise ProfileError(
            f"{pipelines} pipelines, {samples_per_step} samples a step: both are 1 or more; correct the grid or batch"
        )
    return max(1.0, samples_per_step / (pipelines * profile.micro_batch_samples))


def _range_seconds(profile: JobProfile, part: range) -> float:
    layers = (profile.layers[index] for index in part)
    return math.fsum(layer.forward_seconds + layer.backward_seconds for layer in layers)


def _transfer_seconds(profile: JobProfile, size_bytes: int) -> float:
    return profile.link_latency_seconds + size_bytes / profile.link_bytes_per_second


def _reduce_seconds(profile: JobProfile, parameters: int, pipelines: int) -> float:
    return reduce_seconds(
        parameters=parameters,
        pipelines=pipelines,
        gradient_bytes=profile.gradient_bytes_per_parameter,
        bytes_per_second=profile.reduce_bytes_per_second or profile.link_bytes_per_second,
        latency_seconds=profile.link_latency_seconds,
    )


def reduce_seconds(
    *, parameters: float, pipelines: int, gradient_bytes: int, bytes_per_second: float, latency_seconds: float = 0.0
) -> float:
    """A ring all-reduce of a worker's gradients across the pipelines: 2 (D-1)/D of them cross each link."""
    moved = 2.0 * (pipelines - 1) / pipelines * parameters * gradient_bytes
    return moved / bytes_per_second + 2.0 * (pipelines - 1) * latency_seconds


def profile_to_json(profile: JobProfile) -> str:
    """The text form that `bamboo.profile` writes; profile_from_json reads it back unchanged."""
    return json.dumps(asdict(profile), indent=1)


def profile_from_json(text: str) -> JobProfile:
    """Read a profile.

    Raises:
        ProfileError: it isn't JSON, or a key is missing or unknown; says which and what there may be.
    """
    try:
        data = json_of(text)
    except UnreadableError as error:
        raise ProfileError(f"{error}; a profile is JSON: correct it") from error
    if not isinstance(data, dict) or not isinstance(data.get("layers"), list):
        raise ProfileError("a profile is an object whose `layers` is a list; see sim/cost.py, JobProfile")
    layers = tuple(
        LayerCost(**_known(layer, of=LayerCost, where=f"layer {index}")) for index, layer in enumerate(data["layers"])
    )
    return JobProfile(**{**_known(data, of=JobProfile, where="the profile"), "layers": layers})


_MAY_BE_NULL = ("reduce_bytes_per_second", "handover_seconds")
_MOST = sys.float_info.max  # an int may be beyond it
_REQUIRED: Mapping[type, Sequence[str]] = {
    LayerCost: ("forward_seconds", "backward_seconds", "parameters", "output_bytes"),
    JobProfile: ("name", "layers", "micro_batch_samples", "link_bytes_per_second"),
}


def _known(data: Any, *, of: type[LayerCost] | type[JobProfile], where: str) -> dict[str, Any]:
    names = [field.name for field in fields(of)]
    if not isinstance(data, dict):
        raise ProfileError(f"{where} is {data!r}: it is an object with {', '.join(names)}")
    unknown = sorted(set(data) - set(names))
    if unknown:
        raise ProfileError(f"{where} has the unknown key {unknown[0]!r}; there may be {', '.join(names)}")
    missing = [name for name in _REQUIRED[of] if name not in data]
    if missing:
        raise ProfileError(f"{where} lacks {missing[0]!r}; it has {', '.join(names)}")
    empty = [name for name, value in data.items() if value is None and name not in _MAY_BE_NULL]
    if empty:
        raise ProfileError(f"{where}: {empty[0]} is null; give its value")
    numbers = {name: value for name, value in data.items() if name not in ("name", "layers") and value is not None}
    for name, value in numbers.items():
        if not isinstance(value, (int, float)) or not -_MOST <= value <= _MOST:
            raise ProfileError(f"{where}: {name} is {value!r}; give a finite number")
    return data
