"""What to simulate, as users write it: pydantic models, presets, and errors that name file, line and rule."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from ..text_files import UnreadableError, json_of, text_of
from .clock import LONGEST_HOURS
from .errors import ScenarioError
from .scenario_text import is_type_tag, merged, said_of

__all__ = [
    "BambooSpec",
    "CheckpointSpec",
    "DroppingSpec",
    "LiveSpec",
    "MarketSpec",
    "ModelSpec",
    "OnDemandSpec",
    "PoliciesSpec",
    "ProactiveSpec",
    "RunSpec",
    "Scenario",
    "VarunaSpec",
    "load_preset",
    "load_scenario",
    "parse_scenario",
    "preset_names",
    "validated",
]

Probability = Annotated[float, Field(ge=0.0, le=1.0)]
Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
Hours = Annotated[float, Field(gt=0.0, le=LONGEST_HOURS)]
Minutes = Annotated[float, Field(ge=0.1, le=60.0 * LONGEST_HOURS)]
_MOST = 1_000_000
Count = Annotated[int, Field(ge=1)]
Machines = Annotated[int, Field(ge=1, le=_MOST)]
DayOfProbabilities = Annotated[tuple[Probability, ...], Field(min_length=24, max_length=24)]


class _Spec(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="after")
    def _stages_in_order(self) -> _Spec:
        least, most = getattr(self, "least_stages", 1), getattr(self, "most_stages", _MOST)
        if least > most:
            raise ValueError(
                f"least_stages {least} is more than most_stages {most}, so no grid fits; correct one of them"
            )
        return self


class StepRow(_Spec):
    """A measured step: pipelines, stages, and its time."""

    pipelines: Count
    stages: Count
    milliseconds: Positive


class MeasuredSpec(_Spec):
    """How the job ran that --profile is of, which fills this in; what its log doesn't say is None."""

    mode: Literal["off", "lazy", "eager"] | None = None
    """What its replicas cost is in the times."""
    alike: bool | None = None
    """Whether each pipeline had the whole state of its stages."""


class ModelSpec(_Spec):
    """The model that is trained. Give `table` or `profile`."""

    name: str
    source: str = ""
    """Where the figures come from."""
    samples_per_step: Count
    precision: Literal["fp32", "fp16", "bf16"] = "fp32"
    """In bf16, as with ZeRO, a pipeline has only a part of its optimizer state, and can't give it to another one."""
    zero_stage: Literal[0, 1] = 0
    micro_batch_samples: Count | None = None
    """With a table: for timing what isn't in it; None: what fits the table (sim/fitted.py)."""
    steps: Count | None = None
    """Steps to completion; without them a run lasts for run.duration_hours."""
    table: tuple[StepRow, ...] = ()
    """Measured step times, eager FRC included."""
    profile: str | None = None
    """Path of a profile (see sim/cost.py), relative to the scenario's file."""
    measured: MeasuredSpec | None = None
    most_pipelines: Count = 4
    """With a profile: no more pipelines than this."""
    layers: Annotated[int, Field(ge=0)] = 0
    """Layers that stages are made of; 0: stages can be cut anywhere."""
    parameters: Count = 340_000_000
    """For what moving a coordinate's state takes."""
    state_bytes_per_parameter: Count = 16
    redundancy_overhead: NonNegative = 0.2
    """What eager FRC adds to a step: policies without it divide step times by 1 + this. Unused with a profile."""

    @model_validator(mode="after")
    def _one_source_of_step_times(self) -> ModelSpec:
        if bool(self.table) == (self.profile is not None):
            raise ValueError("a model has a table or a profile, one of them; give one")
        grids = [(row.pipelines, row.stages) for row in self.table]
        twice = next((grid for grid in grids if grids.count(grid) > 1), None)
        if twice is not None:
            raise ValueError(f"the table has two rows of the grid {twice[0]} x {twice[1]}; keep one of them")
        return self


class MarketSpec(_Spec):
    """Machines that come and go by hourly probabilities; a trace takes their place."""

    capacity: Machines = 48
    removal_probability: Probability | DayOfProbabilities = 0.1
    addition_probability: Literal["uniform"] | Probability | DayOfProbabilities = "uniform"
    """`uniform`: each hour of the day's is drawn from [0, 1] for each seed."""
    start_hour: Annotated[int, Field(ge=0, le=23)] = 0
    boot_seconds: NonNegative = 45.0
    notice_seconds: Annotated[int, Field(ge=0)] = 0
    zones: tuple[str, ...] = ()
    zone_removal_probability: Probability = 0.0
    """That within an hour all machines of a zone go at once, for each zone; on top of removal_probability."""
    bulk_minutes: Minutes | None = None
    """In each so many minutes two to all but one of the machines go at once, how many and when drawn (sim/bulk.py)."""
    bulk_return_minutes: NonNegative = 2.0
    """After so long as many machines are granted in their place."""
    dollars_per_hour: Positive = 0.91
    price_history: str | None = None
    """Path of a price history, of all machines or by zone, instead of dollars_per_hour."""


class RunSpec(_Spec):
    """When a run ends and how it is summed up."""

    duration_hours: Hours | None = None
    """None: to completion, or to the trace's end."""
    limit_hours: Hours = 2_400.0
    """A run to completion gives up after this."""
    window: Literal["wall", "training"] = "wall"
    """`training` leaves out the time before the first step and after the last, as the authors' simulator does."""
    value: Literal["ratio_of_means", "mean_of_ratios"] = "ratio_of_means"
    """What `value` is: throughput / cost, or as the authors' simulator has it, the time average of their ratio."""


class OnDemandSpec(_Spec):
    """Machines that nobody takes."""

    machines: Machines = 32
    dollars_per_hour: Positive = 3.06
    step_milliseconds: Positive
    grid: tuple[Count, Count] | None = None
    """Pipelines and stages that the step time is of, for `advise` to name; None: nobody knows."""

    @model_validator(mode="after")
    def _has_machines_for_its_grid(self) -> OnDemandSpec:
        if self.grid is not None and self.grid[0] * self.grid[1] > self.machines:
            raise ValueError(
                f"the grid {list(self.grid)} is larger than machines, {self.machines}; correct one of them"
            )
        return self


class CheckpointSpec(_Spec):
    """Checkpoint and restart, on a grid of as many pipelines as fit."""

    stages: Count
    checkpoint_seconds: Positive = 60.0
    stall_seconds: NonNegative = 1.0
    """What one asynchronous checkpoint delays training."""
    restart_seconds: NonNegative = 60.0
    """Ending, meeting, starting processes and process groups."""
    restore_seconds: NonNegative = 14.0
    """Loading the checkpoint."""
    detect_seconds: NonNegative = 0.0
    """Until a loss is known."""


class VarunaSpec(CheckpointSpec):
    """The same, on the best grid for the machines that there are, for joins as well as losses."""

    least_stages: Count = 8
    """Fewer stages don't fit in memory."""
    most_stages: Count = 24


class DroppingSpec(_Spec):
    """Sample dropping: a pipeline that lost a machine is left out until it can be refilled."""

    stages: Count
    regroup_seconds: NonNegative = 5.0
    """To continue without a pipeline."""
    rendezvous_seconds: NonNegative = 20.0
    """To continue with one more."""
    restore_seconds: NonNegative = 14.0
    first_rendezvous_seconds: NonNegative = 30.0
    checkpoint_seconds: Positive = 600.0
    detect_seconds: NonNegative = 0.0


class OdditySpec(_Spec):
    """See policies/bamboo.py, Oddities."""

    repeated_timeout: bool = True
    steps_in_rendezvous: bool = True
    no_rollback: bool = True
    any_loss_slows: bool = True
    stale_standby: bool = True
    heap_order: bool = True
    """Events of one instant come in the order in which a binary heap yields them, not in the file's."""


class BambooSpec(_Spec):
    """Bamboo's parameters; the oddities belong to bamboo-published alone."""

    stages: Count
    first_rendezvous_seconds: NonNegative = 30.0
    rendezvous_seconds: NonNegative = 20.0
    failover_slowdown: Annotated[float, Field(ge=1.0, allow_inf_nan=False)] = 1.5
    risk_threshold: Probability = 0.05
    checkpoint_seconds: Positive = 600.0
    restore_seconds: NonNegative = 14.0
    oddities: OdditySpec = OdditySpec()


class LiveSpec(_Spec):
    """This project's policy. The defaults err towards slower than measured."""

    pipelines: Machines
    stages: Machines
    redundancy: Literal["eager", "lazy", "off", "auto"] = "lazy"
    """As `redundancy.mode` of the engine. Off: no shadows; a lost coordinate is copied from another pipeline. Auto:
    lazy or eager, whichever costs less of a step; where they are equal eager, which does less again after a loss."""
    policy: Literal["fixed", "proactive"] = "fixed"
    """As `policy` of the engine: when workers are taken in and stages move (core/steering.py)."""
    policy_interval_seconds: Positive = 60.0
    """As `policy_interval_seconds` of the engine."""
    plans: bool = True
    """Placements and times by the engine's own plans, where a grid is small enough for that; else a closed form."""
    lazy_overhead: NonNegative = 0.08
    """What keeping replicas up to date adds to a step, without FRC: 1 %, as measured (docs/results.md), and 7 % for
    mirrored gradients of BERT over 10 Gb/s if nothing hides them, which is not measured."""
    copies: Literal[1, 2] = 1
    """As `redundancy.copies`: shadows of each coordinate."""
    second_overhead: NonNegative | None = None
    """What second shadows add to a step; None: as much as the first ones (lazy_overhead). Gradients go to both, and
    both take the optimizer's step."""
    eager_overhead: NonNegative | None = None
    """The same for eager; None: as lazy, whose steps took within 0.4 % as long on 2 H200 (docs/results.md). Only what
    fits into bubbles is done ahead."""
    detect_seconds: NonNegative = 3.0
    """Until a vanished machine's lease has run out (coordinator.lease_seconds)."""
    regroup_seconds: NonNegative = 1.0
    """Abort and new process groups: 0.84 s were measured on 4 H100."""
    handover_seconds: NonNegative = 1.0
    """A reconfiguration at an iteration boundary, besides the state that it moves."""
    join_seconds: NonNegative = 20.0
    """A booted machine starts its process, while the others train."""
    start_seconds: NonNegative = 30.0
    """From the first machines' joining to the first step."""
    fatal: Literal["restart", "in-place"] = "restart"
    """After a fatal loss: the job is started again from the checkpoint in the store, or those who are left load the
    newest checkpoint in memory, and the one in the store only where that is lost, too. Without replicas always the
    former."""
    restart_seconds: NonNegative = 60.0
    """After a fatal loss, besides loading the checkpoint: 26.6 s were measured for stock's restart on one machine, and
    other machines have to be there, too."""
    restore_seconds: NonNegative = 14.0
    checkpoint_seconds: Positive = 600.0
    memory_checkpoint_seconds: Positive = 10.0
    """Between checkpoints in memory. An assumption."""
    memory_copies: Count = 1
    """As `checkpoint.memory_copies`: how many workers have one besides a coordinate's owner and shadows' holders."""
    memory_overhead: NonNegative = 0.0
    """What making them adds to a step. The engine makes them less often where it would be more than 0.01."""
    in_place_seconds: NonNegative = 10.0
    """To load the state in place, detecting and connecting not included: what is asked of the engine, not measured."""
    link_bytes_per_second: Positive = 0.6e9
    """What a machine receives state at: half of 10 Gb/s."""
    transfer_seconds: NonNegative = 0.0
    """Of a reconfiguration or a copy, besides what the state of each coordinate takes."""
    join_handover_seconds: NonNegative = 0.0
    """What a reconfiguration takes longer where somebody joins, besides its transfer: all connect to the newcomer."""
    join_transfer_seconds: NonNegative = 0.0
    """What a transfer takes longer where somebody joins, to whom all is new."""
    coordinate_copy_seconds: NonNegative | None = None
    """What the state of one coordinate takes; None: by its bytes and link_bytes_per_second."""
    copying_slowdown: Annotated[float, Field(ge=1.0, allow_inf_nan=False)] = 1.1
    """Of a step while lost shadows are rebuilt in the background."""
    hosting_overhead: NonNegative = 0.05
    """What a step takes longer because workers host more than one coordinate."""
    state_memory_bytes: Positive = 8.0e9
    """Of a worker, for coordinates and shadows: half of a 16 GB card. With too few machines training waits."""


class ProactiveSpec(_Spec):
    """Proactive migration by predicted availability, as in Parcae (NSDI'24)."""

    least_stages: Count = 8
    most_stages: Count = 24
    interval_seconds: Positive = 60.0
    look_ahead: Count = 12
    history: Annotated[int, Field(ge=4)] = 12
    predictors: Annotated[tuple[str, ...], Field(min_length=1)] = ("persistence", "moving-average")
    """The one with the smallest error so far is followed; `arima` needs the extra predict."""
    intra_stage_seconds: NonNegative = 10.0
    """A pipeline is dropped or whole machines swapped: groups are rebuilt, nothing moves."""
    inter_stage_seconds: NonNegative = 25.0
    """Machines take up another stage, besides the state that they receive."""
    pipeline_seconds: NonNegative = 45.0
    """To cut the model again, besides the state that moves."""
    restore_seconds: NonNegative = 14.0
    detect_seconds: NonNegative = 0.0
    checkpoint_seconds: Positive = 60.0
    link_bytes_per_second: Positive = 0.6e9
    exact_limit: Annotated[int, Field(ge=0)] = 64
    """Up to so many expected preemptions their effect is counted exactly; beyond it it is sampled."""
    samples: Count = 1_000


class ReinstantiatingSpec(_Spec):
    """New pipelines of whoever is left, in the manner of Oobleck (SOSP'23) or CheckFree (2025)."""

    least_stages: Count = 8
    most_stages: Count = 24
    reconfigure_seconds: NonNegative = 10.0
    """To make new groups and copy layers."""
    rollback_seconds: NonNegative = 74.0
    """On top, where a stage has no replica left and the job starts again from its checkpoint."""
    checkpoint_seconds: Positive = 60.0
    stall_seconds: NonNegative = 1.0
    detect_seconds: NonNegative = 0.0


class ReroutingSpec(_Spec):
    """A lost machine's micro-batches go to its peers, in the manner of ReCycle (SOSP'24)."""

    stages: Count
    reroute_seconds: NonNegative = 1.0
    restart_seconds: NonNegative = 60.0
    restore_seconds: NonNegative = 14.0
    checkpoint_seconds: Positive = 60.0
    detect_seconds: NonNegative = 0.0


class PoliciesSpec(_Spec):
    """Parameters by policy; only the policies that have some can be run, and the oracle, which needs none."""

    on_demand: OnDemandSpec | None = None
    checkpoint: CheckpointSpec | None = None
    varuna: VarunaSpec | None = None
    dropping: DroppingSpec | None = None
    bamboo: BambooSpec | None = None
    live: LiveSpec | None = None
    proactive: ProactiveSpec | None = None
    oobleck: ReinstantiatingSpec | None = None
    checkfree: ReinstantiatingSpec | None = None
    recycle: ReroutingSpec | None = None


class Scenario(_Spec):
    """Everything that a run depends on, but for the trace and the seeds."""

    description: str = ""
    model: ModelSpec
    market: MarketSpec = MarketSpec()
    run: RunSpec = RunSpec()
    policies: PoliciesSpec
    policy: str | None = None
    """What is run if the command names no policy; None: all."""

    @field_validator("policy")
    @classmethod
    def _is_a_name(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"[a-z-]+", value):
            raise ValueError("a policy's name has small letters and hyphens")
        return value


def preset_names() -> list[str]:
    """The presets that come with the package."""
    folder = resources.files(__package__) / "presets"
    return sorted(entry.name.removesuffix(".json") for entry in folder.iterdir() if entry.name.endswith(".json"))


def load_preset(name: str) -> Scenario:
    """A preset by name; an unknown one is a ScenarioError that lists what there is."""
    if name not in preset_names():
        raise ScenarioError(f"preset {name!r} is unknown; there are {', '.join(preset_names())}")
    text = (resources.files(__package__) / "presets" / f"{name}.json").read_text(encoding="utf-8")
    return parse_scenario(text, where=f"preset {name}")


def load_scenario(path: Path | str) -> Scenario:
    """A scenario from a JSON file. Its `preset`, if any, is the base that the rest overrides.

    Raises:
        ScenarioError: names the file, the line and the rule.
    """
    try:
        text = text_of(Path(path))
    except UnreadableError as error:
        raise ScenarioError(f"{path}: {error}; give the path of a scenario") from error
    return parse_scenario(text, where=str(path))


def parse_scenario(text: str, *, where: str) -> Scenario:
    """See load_scenario; `where` is what errors call the text."""
    try:
        data = json_of(text)
    except UnreadableError as error:
        at = f"{where}:{error.line}" if error.line else where
        raise ScenarioError(f"{at}: {error}; correct it") from error
    if not isinstance(data, dict):
        raise ScenarioError(f"{where}:1: a scenario is a JSON object; put it in braces")
    base = data.pop("preset", None)
    if base is not None:
        data = merged(load_preset(str(base)).model_dump(exclude_none=True), data)
    return validated(data, where=where, text=text)


def validated(data: dict[str, Any], *, where: str, text: str = "") -> Scenario:
    """Check a scenario's data; `text` is where lines are looked up for messages."""
    try:
        return Scenario.model_validate(data)
    except ValidationError as error:
        said: dict[tuple[str, ...], str] = {}
        for finding in error.errors(include_url=False):  # of a union's members, the first
            path = tuple(str(part) for part in finding["loc"] if not is_type_tag(str(part)))
            said.setdefault(path, said_of(finding, path, model=Scenario, where=where, text=text))
        raise ScenarioError("; ".join(said.values())) from error
