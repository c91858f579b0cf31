"""This project's policy made ready: which mode, which profile, and whether the engine's own plans can time it."""

from __future__ import annotations

from collections.abc import Callable

from ..core.grid import Grid as CoreGrid
from ..core.timing import Profile
from .cost import JobProfile, reduce_seconds, split_layers, total_work_seconds
from .errors import ScenarioError
from .fitted import TableModel, fitted_profile
from .jobs import Job
from .measured import MEASURED
from .planned import MOST_PASSES, PlannedGrid, micro_batches_of
from .policies.planned import IterationCosts
from .scenario import LiveSpec, ModelSpec, Scenario
from .steptimes import Grid

__all__ = [
    "alike",
    "busy_seconds",
    "effective_mode",
    "how_timed",
    "least_seconds",
    "overhead_of",
    "planned_grid",
    "profile_of",
    "said_of_costs",
    "said_of_its_profile",
    "said_of_state",
]

# Of a mean forward, that passes before a tensor is on another worker, where nothing says more (core/measuring.py).
_HANDOVER_SHARE = 0.1


def effective_mode(spec: LiveSpec, mode: str | None) -> str:
    """`redundancy.mode` of a run: the one asked for, or the scenario's, with `auto` decided."""
    wanted = spec.redundancy if mode is None else mode
    if wanted != "auto":
        return wanted
    eager = spec.lazy_overhead if spec.eager_overhead is None else spec.eager_overhead
    return "eager" if eager <= spec.lazy_overhead else "lazy"


def overhead_of(spec: LiveSpec) -> float:
    """What the mode, second shadows and checkpoints in memory add to an iteration, as a fraction."""
    if spec.redundancy == "off":
        return 0.0
    eager = spec.lazy_overhead if spec.eager_overhead is None else spec.eager_overhead
    first = eager if spec.redundancy == "eager" else spec.lazy_overhead
    second = spec.lazy_overhead if spec.second_overhead is None else spec.second_overhead
    in_memory = spec.memory_overhead if spec.fatal == "in-place" else 0.0
    return first + (second if spec.copies == 2 else 0.0) + in_memory


def alike(model: ModelSpec) -> bool:
    """Whether every pipeline has the whole state of its stages."""
    return model.precision != "bf16" and model.zero_stage == 0


def planned_grid(job: Job, spec: LiveSpec) -> tuple[PlannedGrid, IterationCosts] | None:
    """The grid with its plans, and what an iteration takes besides; None if a closed form has to do.

    That is so where the scenario wants it, the table says too little, or the grid is so large that planning it takes
    seconds for every number of workers.

    Raises:
        ScenarioError: the grid does not start, since the batch does not divide.
    """
    profile = profile_of(job, spec) if spec.plans else None
    samples = job.scenario.model.samples_per_step
    if profile is None:
        if spec.plans and samples % spec.pipelines:
            raise _does_not_start(samples, spec.pipelines, 1)
        return None
    size = profile.micro_batch_samples
    micro_batches = micro_batches_of(samples_per_step=samples, pipelines=spec.pipelines, micro_batch_samples=size)
    if micro_batches is None:
        raise _does_not_start(samples, spec.pipelines, size)
    if 2 * spec.pipelines * spec.stages * micro_batches > MOST_PASSES:
        return None
    grid = PlannedGrid(
        CoreGrid(spec.pipelines, spec.stages),
        _stage_times(profile, spec.stages),
        micro_batches,
        protected=spec.redundancy != "off",
        alike=alike(job.scenario.model),
        eager=spec.redundancy == "eager",
        copies=spec.copies,
    )
    largest = max(sum(profile.layers[i].parameters for i in part) for part in split_layers(profile, stages=spec.stages))
    costs = IterationCosts(
        fixed_seconds=profile.fixed_seconds,
        reduce_seconds=reduce_seconds(
            parameters=largest,
            pipelines=spec.pipelines,
            gradient_bytes=profile.gradient_bytes_per_parameter,
            bytes_per_second=profile.reduce_bytes_per_second or profile.link_bytes_per_second,
        )
        + largest * profile.optimizer_seconds_per_parameter,
        overhead=overhead_of(spec),
    )
    return grid, costs


def _does_not_start(samples: int, pipelines: int, micro_batch_samples: int) -> ScenarioError:
    return ScenarioError(
        f"{pipelines} pipelines with micro-batches of {micro_batch_samples} do not share {samples} samples a step "
        "evenly, so the job would not start; change policies.live.pipelines, or model.micro_batch_samples"
    )


def profile_of(job: Job, spec: LiveSpec) -> JobProfile | None:
    """Times of layers: given, measured, or fitted to the table."""
    if job.profile is not None:
        return job.profile if spec.stages <= len(job.profile.layers) else None
    model = job.scenario.model
    table = {Grid(row.pipelines, row.stages): row.milliseconds / 1000.0 for row in model.table}
    return fitted_profile(
        TableModel(
            name=model.name,
            samples_per_step=model.samples_per_step,
            layers=model.layers,
            parameters=model.parameters,
            state_bytes_per_parameter=model.state_bytes_per_parameter,
            overhead=model.redundancy_overhead,
            micro_batch_samples=model.micro_batch_samples,
        ),
        table,
        own=Grid(spec.pipelines, spec.stages),
    )


def least_seconds(job: Job) -> Callable[[int], float]:
    """Of a number of machines: no policy's step takes less. For the oracle.

    The least of what the step times allow and, where this project's policy is timed by its plans, of all work shared
    evenly without any bubble, since several blocks on a worker fill each other's bubbles.
    """
    spec = job.scenario.policies.live
    profile = None if spec is None or not spec.plans else profile_of(job, spec)
    work = 0.0 if profile is None else total_work_seconds(profile, samples_per_step=job.scenario.model.samples_per_step)

    def least(machines: int) -> float:
        by_steps = job.plain_steps.fastest_seconds(machines)
        return by_steps if profile is None else min(by_steps, work / machines + profile.fixed_seconds)

    return least


def busy_seconds(job: Job, grid: Grid) -> float:
    """What a stage of a grid computes in a step, without bubbles; all of the step, where nothing says more."""
    spec = job.scenario.policies.live
    profile = None if spec is None else profile_of(job, spec)
    if profile is None:
        return job.plain_steps.grid_seconds(grid)
    return total_work_seconds(profile, samples_per_step=job.scenario.model.samples_per_step) / grid.size


def _stage_times(profile: JobProfile, stages: int) -> Profile:
    parts = split_layers(profile, stages=stages)
    forward = tuple(sum(profile.layers[i].forward_seconds for i in part) for part in parts)
    backward = tuple(sum(profile.layers[i].backward_seconds for i in part) for part in parts)
    handover = profile.handover_seconds
    if handover is None:
        sent = max(profile.layers[part[-1]].output_bytes for part in parts)
        by_link = profile.link_latency_seconds + sent / profile.link_bytes_per_second
        handover = max(_HANDOVER_SHARE * sum(forward) / stages, by_link)
    return Profile(forward, backward, handover=handover)


def how_timed(job: Job) -> str:
    """In words: where the step times of this project's policy come from."""
    spec = job.scenario.policies.live
    if spec is None:
        return ""
    planned = planned_grid(job, spec)
    if planned is None:
        return "steps of this project's policy by a closed form, not by its plans"
    if job.profile is not None:
        source = f"times of layers from the profile {job.scenario.model.profile}"
    else:
        source = "times of layers fitted to the step table"
    return f"this project's policy by the engine's own placements and plans, with {source}"


def said_of_costs(scenario: Scenario) -> str:
    """In words: whether the costs of losses and joins were measured, and in whose job."""
    if scenario.model.measured is not None:
        return "those that the profile has were measured in your own job, the rest are assumptions"
    if scenario.model.source.startswith(MEASURED):
        return f"of these the scenario says: {scenario.model.source.removesuffix('.')}"
    return (
        "these are assumptions, none of them measured on your cluster (`ds_bamboo profile` measures them, --profile "
        "uses them; scripts/sim_validate.py compares the simulation with the engine)"
    )


def said_of_its_profile(job: Job) -> list[str]:
    """In a sentence: that only the times are read of a job's profile that a scenario names."""
    spec = job.scenario.policies.live
    if not job.of_a_job or job.scenario.model.measured is not None or spec is None:
        return []
    return [
        f"of {job.scenario.model.profile}, which a job has measured, only its times are read here, and "
        f"policies.live.lazy_overhead {spec.lazy_overhead:g} is added to them; --profile reads its grid, costs and mode"
    ]


def said_of_state(model: ModelSpec) -> str:
    """In words: by what mode off survives a loss, if by anything."""
    if alike(model):
        return (
            "each pipeline has the whole state (no bf16, no ZeRO), so mode off survives by replicas in other pipelines"
        )
    return "no pipeline has another one's state (bf16 or ZeRO), so mode off survives no loss"
