"""The "bamboo" section of a DeepSpeed configuration.

Everything has a default that works on one machine, so ``"bamboo": {}`` turns the plugin on. Keys that
don't exist are refused with the nearest one that does. ``load_bamboo_section`` reads the section from
whatever DeepSpeed itself accepts.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from deepspeed_bamboo.cloud.scripted import parse_script
from deepspeed_bamboo.config.idle_settings import idle_settings
from deepspeed_bamboo.config.locations import endpoint_problem, located
from deepspeed_bamboo.config.reading import read_leniently
from deepspeed_bamboo.errors import ConfigError
from deepspeed_bamboo.faults import FaultScript
from deepspeed_bamboo.storage.folders import location_problem
from deepspeed_bamboo.suggest import nearest

SECTION = "bamboo"
_SHOWN = 10  # of many wrong values of one kind

RedundancyMode = Literal["off", "lazy", "eager", "full", "auto"]
OffloadTarget = Literal["none", "cpu", "recompute"]


# Eleven days: more means "for ever" to nobody, and overflows clocks.
Seconds = Annotated[float, Field(gt=0, le=1_000_000, allow_inf_nan=False)]
Location = Annotated[str, BeforeValidator(located), Field(min_length=1)]


class Section(BaseModel):
    """Base of all parts: unknown keys refused, no silent conversions, immutable."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)


class RedundancyConfig(Section):
    """What each worker keeps and computes for its successor's stage."""

    mode: RedundancyMode = "lazy"
    """off: no shadows; lazy: a replica, redundant forward only after a loss; eager: redundant forward in
    the pipeline's bubbles, backward after a loss; full: both always (the paper's upper bound); auto: lazy or eager,
    whichever loses less time at the rate of losses and with the overhead that the job measures."""

    copies: Annotated[int, Field(ge=1, le=2)] = 1
    """How many shadows each stage has: 1, or 2 for lazy, eager and auto. With 2 any two workers may be lost at the same
    moment and no step is done again; memory and messages for shadows are twice as much."""

    losses_per_hour: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """For auto: how many workers an hour you expect to lose; null: only the losses that the job has seen count."""

    offload: OffloadTarget = "cpu"
    """Where the redundant forward keeps what its backward needs: none (device memory), cpu, or recompute."""

    overlap: bool = False
    """For eager: redundant forwards that fit into no bubble run too, beside other work. A loss then repeats less, and
    every iteration takes longer."""

    memory_limit_gigabytes: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Most memory that redundancy may take in each worker; null: no limit."""

    @model_validator(mode="after")
    def _check_copies(self) -> RedundancyConfig:
        if self.copies == 2 and self.mode in ("off", "full"):
            raise ValueError(
                f"copies is 2 and mode is {self.mode!r}; a second shadow needs mode lazy, eager or auto: set one of "
                "them, or copies to 1"
            )
        return self

    @model_validator(mode="after")
    def _check_overlap(self) -> RedundancyConfig:
        if self.overlap and self.offload == "recompute":
            raise ValueError(
                "overlap runs redundant forwards outside of bubbles, and with offload: recompute they keep too "
                "little to be worth it; set overlap to false, or offload to cpu or none"
            )
        return self


class CoordinatorConfig(Section):
    """The etcd through which workers agree on who is alive."""

    endpoints: list[str] = Field(default_factory=list)
    """host:port (or unix:/path) of each member of your etcd; empty: the job starts its own on the first node."""

    lease_seconds: Annotated[Seconds, Field(ge=0.1)] = 3.0
    """A node that is silent for this long counts as lost."""

    connect_timeout_seconds: Seconds = 5.0
    """How long to try to reach etcd at the start before giving up."""

    suspicion_seconds: Seconds | None = None
    """How long a transfer may stand still before its peer is suspected; null: lease_seconds."""

    prefix: str = "/deepspeed_bamboo"
    """Under which etcd keys the job lives; starts with a slash."""

    compact: bool = False
    """Have your etcd forget replaced values of all its keys once an hour; for one that nothing else uses."""

    username: Annotated[str, Field(min_length=1)] | None = None
    """User of an etcd with authentication; null: it has none."""

    password_env: str | None = None
    """Name of the environment variable, on every machine, that holds that user's password."""

    ca_cert: Location | None = None
    """PEM file of the authority that signed etcd's certificate; null: connections are not encrypted."""

    cert: Location | None = None
    """PEM file of this side's own certificate, if etcd asks for one."""

    key: Location | None = None
    """PEM file of the private key of ``cert``."""

    @property
    def suspicion_limit_seconds(self) -> float:
        """suspicion_seconds with its default filled in."""
        return self.lease_seconds if self.suspicion_seconds is None else self.suspicion_seconds

    @field_validator("endpoints")
    @classmethod
    def _check_endpoints(cls, endpoints: list[str]) -> list[str]:
        wrong = [f"{endpoint!r} {problem}" for endpoint in endpoints if (problem := endpoint_problem(endpoint))]
        wrong += [f"{endpoint!r} is listed twice" for endpoint, times in Counter(endpoints).items() if times > 1]
        if wrong:
            more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
            raise ValueError("; ".join(sorted(wrong)[:_SHOWN]) + more)
        return endpoints

    @field_validator("password_env")
    @classmethod
    def _check_password_env(cls, name: str | None) -> str | None:
        if name is not None and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ValueError("name the environment variable that holds the password, as in ETCD_PASSWORD; not itself")
        return name

    @model_validator(mode="after")
    def _check_guards(self) -> CoordinatorConfig:
        guards = [name for name in ("username", "ca_cert", "cert", "key") if getattr(self, name) is not None]
        if guards and not self.endpoints:
            says = "says" if len(guards) == 1 else "say"
            raise ValueError(f"{', '.join(guards)} {says} how to reach your own etcd; name it in endpoints, too")
        if self.compact and not self.endpoints:
            raise ValueError("compact is for your own etcd, which endpoints names; a job's own is always compacted")
        if (self.username is None) != (self.password_env is None):
            raise ValueError("username and password_env go together; give both or none")
        if (self.cert is None) != (self.key is None):
            raise ValueError("cert and key go together; give both or none")
        if self.cert is not None and self.ca_cert is None:
            raise ValueError("cert needs ca_cert as well, with which etcd's own certificate is checked")
        return self

    @field_validator("prefix")
    @classmethod
    def _check_prefix(cls, prefix: str) -> str:
        if not re.fullmatch(r"(/[^/\s]+)+", prefix):
            raise ValueError("a prefix starts with a slash, has no empty parts and no blanks, as in /team/jobs")
        if "/." in prefix:
            raise ValueError("no part of a prefix begins with a dot, since keys that do are the jobs' own")
        return prefix


class TopologyConfig(Section):
    """How many pipelines are trained, and where machines stand, so that neighbours don't vanish together."""

    pipelines: Annotated[int, Field(ge=1)] | None = None
    """How many pipelines are trained, however many workers there are; null: as many as the checkpoint has that
    the job continues from, else as many as the workers at the start fill (workers divided by stages, rounded down), at
    least one."""

    slow_workers: Literal["less", "drain"] = "less"
    """What happens to a worker that has become much slower than the others: it gets less to do, or its node is
    drained."""

    zones: Annotated[str, Field(min_length=1)] = "auto"
    """auto: ask BAMBOO_ZONE, then the cloud's metadata service; anything else: this machine's zone."""

    max_restarts: Annotated[int, Field(ge=0)] = 3
    """How often a slot replaces a worker that was lost in training (never one whose script failed); 0: never.

    A worker lost before training begins is another matter: then all workers start again, three times at most.
    """

    restart_seconds: Seconds = 5.0
    """How long after the first loss of a slot its worker is replaced; twice as long after each further one."""

    wait_for_machines_seconds: Annotated[float, Field(ge=0.0, le=1_000_000, allow_inf_nan=False)] = 300.0
    """How long the agents of a job with ``checkpoint.dir`` stay where nobody is left who can train. Slots that replace
    their workers, and machines that come meanwhile, start anew from the newest checkpoint; 0: the job ends at once."""


class NoticesConfig(Section):
    """Who warns that this machine is about to be taken. Its workers then leave in time, and nothing is lost."""

    source: Literal["auto", "none", "aws", "gcp", "azure", "scripted"] = "auto"
    """auto: the cloud that this machine is in, if any; none: nobody; scripted: ``script``, for tests."""

    base_url: Annotated[str, Field(pattern=r"^https?://[^/\s]+$")] | None = None
    """Where the metadata service of ``source`` is; null: where that cloud has it."""

    poll_seconds: Seconds | None = None
    """How often to ask; null: as often as the cloud recommends."""

    script: list[Any] | Location | None = None
    """For ``scripted``: a list of notices, or the path of a JSON file with one (BAMBOO_NOTICES does the same)."""

    rebalance: Literal["tell", "drain"] = "tell"
    """What to do when a machine is only more likely than others to be taken soon."""

    sigterm: Literal["abort", "drain"] = "abort"
    """What SIGTERM to an agent means. abort: the job ends; drain: its node is about to go (SLURM, Kubernetes).
    On machines of ``ds_bamboo fleet`` drain, unless it is set."""

    grace_seconds: Seconds = 30.0
    """How long after such a signal, or SIGUSR1, the node disappears."""

    @model_validator(mode="after")
    def _check_source(self) -> NoticesConfig:
        if self.base_url is not None and self.source not in ("aws", "gcp", "azure"):
            raise ValueError("base_url is that of one cloud; set source to aws, gcp or azure")
        if (self.script is not None) != (self.source == "scripted"):
            raise ValueError("script and source: scripted go together; give both or none")
        if isinstance(self.script, list):
            parse_script(self.script, where="notices.script")
        return self


class HangsConfig(Section):
    """What to do about a worker that stands still: an endless loop in a hook, a data loader in a deadlock."""

    after_seconds: Seconds | None = None
    """How long a worker may be busy with one thing before it is named, with its Python stack; null: ten times a usual
    step, twice the longest so far, and a minute, whichever is most."""

    start_seconds: Seconds = 600.0
    """The same until two steps are complete: importing, building the model, compiling."""

    action: Literal["warn", "drain", "end"] = "warn"
    """What follows. warn: nothing; drain: the worker is ended, and the job continues as after any loss; end: the job
    ends, with exit code 75."""


class CheckpointConfig(Section):
    """Checkpoints taken beside training, for losses that redundancy does not cover."""

    dir: Location | None = None
    """A directory that all machines see, or s3://bucket/prefix, for this training alone; null: none are written."""

    interval_minutes: Annotated[float, Field(gt=0, le=16_000, allow_inf_nan=False)] = 10.0
    """Time between checkpoints."""

    keep: Annotated[int, Field(ge=1, le=1000)] = 2
    """How many of the newest complete checkpoints are kept. With 1 there is no other if it is damaged."""

    memory_interval_seconds: Seconds | None = None
    """Time between checkpoints in the host memory of other workers, which survivors go back to when a loss takes the
    last live copy of a stage; null: none are made, and they go back to the one in ``dir``, or the job ends."""

    memory_copies: Annotated[int, Field(ge=1, le=1000)] = 1
    """How many workers keep each stage's memory checkpoint, besides its owner and the holder of its shadow."""

    memory_limit_gigabytes: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Most host memory that memory checkpoints may take in each worker, and as much again the micro-batches that are
    kept to do steps again; null: a quarter of what is free at the start, shared by the workers of a machine."""

    memory_megabytes_per_second: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Most that each worker sends of its copies in a second, in units of 2**20 bytes; null: as fast as it can. A memory
    checkpoint whose copies take longer than ``memory_interval_seconds`` delays the next one."""

    @field_validator("dir")
    @classmethod
    def _check_dir(cls, location: str | None) -> str | None:
        problem = None if location is None else location_problem(location)
        if problem is not None:
            raise ValueError(f"{location!r} {problem}")
        return location


class BambooConfig(Section):
    """The whole section."""

    enabled: bool = True
    """false: exactly as if the section were not there."""

    redundancy: RedundancyConfig = Field(default_factory=RedundancyConfig)
    """What each worker keeps and computes for its successor's stage."""

    coordinator: CoordinatorConfig = Field(default_factory=CoordinatorConfig)
    """The etcd through which workers agree on who is alive."""

    topology: TopologyConfig = Field(default_factory=TopologyConfig)
    """Where machines stand."""

    notices: NoticesConfig = Field(default_factory=NoticesConfig)
    """Who warns that this machine is about to be taken."""

    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    """Checkpoints, for losses that redundancy can't cover."""

    hangs: HangsConfig = Field(default_factory=HangsConfig)
    """What is done about a worker that stands still."""

    policy: Literal["fixed", "proactive"] = "fixed"
    """When workers that join are taken in and stages move for speed. fixed: at the next boundary; proactive: once that
    is expected to be worth its pause, by how often machines were seen to come and go; a worker waits up to a minute."""

    policy_interval_seconds: Seconds = 60.0
    """How long an interval is in which proactive counts what comes and goes; it foresees twelve of them by the last
    sixty."""

    other_engines: Literal["refuse", "warn"] = "refuse"
    """What to do when the script makes an engine that is not the plugin's, so that a loss would end the job: refuse
    (an error), or warn, for one that is not worth protecting."""

    event_log: Location | None = None
    """Directory that gets one JSON-lines file per worker; null: no event log."""

    profile: Location | None = None
    """JSON file that gets the measured seconds of each stage's passes and the speeds of slow workers, for
    ``ds_bamboo plan --profile``; null: none is written."""

    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    """Seed of the random numbers that forwards draw; null: the seed that torch had at initialize."""

    gradient_norm: Literal["stock", "global"] = "stock"
    """What gradients are clipped by. stock: DeepSpeed's rule, by logical stage, whoever hosts it (in fp32 only
    stage 0 contributes to the norm, which clips later stages less); global: the norm over all stages."""

    faults: list[Any] | Location | None = None
    """Scripted faults for tests: a list, or the path of a JSON file with one (BAMBOO_FAULTS wins)."""

    debug_check_shadows: Annotated[int, Field(ge=0)] = 0
    """Compare every shadow with its owner each so many steps; 0: never."""

    @property
    def remembers(self) -> bool:
        """True where workers keep memory checkpoints of each other's stages."""
        return self.checkpoint.memory_interval_seconds is not None and self.redundancy.mode != "off"

    @property
    def goes_back(self) -> bool:
        """True where survivors go back to a checkpoint, in memory or in ``checkpoint.dir``, after a fatal loss."""
        return self.remembers or (self.checkpoint.dir is not None and self.redundancy.mode != "off")

    @property
    def waits_seconds(self) -> float:
        """How long agents wait for machines where nobody is left who can train; 0 where the job ends then."""
        return self.topology.wait_for_machines_seconds if self.checkpoint.dir is not None else 0.0

    @field_validator("faults")
    @classmethod
    def _check_faults(cls, faults: list[Any] | str | None) -> list[Any] | str | None:
        if isinstance(faults, list):
            FaultScript.parse(faults)
        return faults


def parse_bamboo_section(section: object) -> BambooConfig:
    """Validate the value of the "bamboo" key. Raises ConfigError that lists every problem."""
    config, problems = read_bamboo_section(section)
    if problems:
        raise ConfigError(*problems, where='the "bamboo" section')
    return config


def read_bamboo_section(section: object) -> tuple[BambooConfig, tuple[str, ...]]:
    """The settings, and everything that is wrong with them, a sentence each; parts that are wrong have defaults.

    Of what is wrong only because of another wrong part nothing is said. Raises ConfigError where it is no object.
    """
    if not isinstance(section, Mapping):
        raise ConfigError(f"got {section!r}, but the section is an object; write {{}} for all defaults", where=SECTION)
    config, wrong, problems = read_leniently(section, model=BambooConfig, name=SECTION)
    if "enabled" in wrong or not wrong <= BambooConfig.model_fields.keys():  # nobody knows which part was meant
        return config, problems
    rest = (idle for idle in idle_settings(config) if not any(f"{part}." in idle for part in wrong))
    return config, (*problems, *rest)


def load_bamboo_section(source: Mapping[str, Any] | str | os.PathLike[str]) -> BambooConfig | None:
    """The validated "bamboo" section of a DeepSpeed configuration, or None when it has none.

    ``source``: what ``deepspeed.initialize(config=...)`` takes: a dict, the path of a JSON file
    (comments and trailing commas allowed), or base64 of one. It is not changed.
    Raises ConfigError for a file that isn't there, can't be read or parsed, and for a wrong section.
    """
    return bamboo_section_of(load_deepspeed_settings(source))


def bamboo_section_of(settings: Mapping[str, Any]) -> BambooConfig | None:
    """The validated "bamboo" section of an already loaded DeepSpeed configuration, or None when it has none.

    Raises ConfigError for a wrong section, and for a key that looks like a misspelled "bamboo".
    """
    if SECTION in settings:
        return parse_bamboo_section(settings[SECTION])
    for key in settings:
        if nearest(key, [SECTION], similarity=0.8):
            raise ConfigError(f"unknown key {key!r} in the DeepSpeed configuration; did you mean {SECTION!r}?")
    return None


def load_deepspeed_settings(source: Mapping[str, Any] | str | os.PathLike[str]) -> dict[str, Any]:
    """The whole DeepSpeed configuration as a new dict (its values are shared with ``source``).

    Raises ConfigError for a file that isn't there or can't be read or parsed.
    """
    if isinstance(source, Mapping):
        return dict(source)
    if not isinstance(source, str | os.PathLike):
        raise ConfigError(f"got {type(source).__name__} as DeepSpeed configuration; give a dict, a path or base64")
    from deepspeed.runtime.tensor_parallel.init_utils import load_ds_config

    text = os.fspath(source)
    try:
        settings = load_ds_config(text)
    except OSError as error:
        raise ConfigError(f"{text} can't be read ({error.strerror}); give a JSON file") from error
    except (ValueError, RecursionError) as error:
        if not os.path.exists(text):  # noqa: PTH110 (a base64 string may be too long for a Path)
            raise ConfigError(f"DeepSpeed configuration {_shorten(text)} does not exist; check the path") from error
        raise ConfigError(f"{text} is no valid DeepSpeed JSON: {error}") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"{_shorten(text)} holds no JSON object; a DeepSpeed configuration is {{...}}")
    return settings


def _shorten(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}..."
