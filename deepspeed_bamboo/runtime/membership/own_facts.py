"""What this worker's script has built, for comparison with newcomers (``core/job_facts.py``)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

from deepspeed_bamboo.config.section import SECTION
from deepspeed_bamboo.core.job_facts import JobFacts
from deepspeed_bamboo.core.placement import WorkerId
from deepspeed_bamboo.errors import ConfigError
from deepspeed_bamboo.runtime.job.session import WorkerSession
from deepspeed_bamboo.runtime.stock.hosting import StageHost


class BuiltEngine(Protocol):
    """What is read of an engine that stock has built."""

    session: WorkerSession
    module: Any
    _config: Any

    @property
    def host(self) -> StageHost:
        """The stages that this worker holds."""


# What is printed and watched may differ from machine to machine.
_NOT_COMPARED = frozenset(
    {
        SECTION,
        "comet",
        "comms_logger",
        "csv_monitor",
        "dump_state",
        "flops_profiler",
        "steps_per_print",
        "tensorboard",
        "wall_clock_breakdown",
        "wandb",
    }
)
_OWN_SETTINGS = {"redundancy", "seed", "gradient_norm"}


def settings_of(config: Any) -> dict[str, Any]:
    """The part of DeepSpeed's configuration that results depend on, as values of JSON."""
    settings = {name: value for name, value in config._param_dict.items() if name not in _NOT_COMPARED}
    its: dict[str, Any] = json.loads(json.dumps(settings, default=str))
    return its


def own_facts(engine: BuiltEngine) -> JobFacts:
    """Of the stages of this worker, as stock DeepSpeed has built them."""
    engine.host.save()
    own = engine.session.config.model_dump(include=_OWN_SETTINGS)
    return JobFacts(
        settings={**settings_of(engine._config), SECTION: json.loads(json.dumps(own, default=str))},
        layers=tuple(_kind(spec) for spec in engine.module._layer_specs),
        stages={replica.coordinate.stage: _fingerprint(replica.module) for replica in engine.host.owners()},
    )


def common_facts(facts: Mapping[WorkerId, JobFacts]) -> JobFacts:
    """Of a job that starts, from those of all its workers. Raises ConfigError when they were started differently."""
    (first, common), *others = facts.items()
    stages = dict(common.stages)
    for worker, own in others:
        differences = replace(common, stages=stages).differences(own)
        if differences:
            where = f"worker {worker} was started otherwise than worker {first} (there: the job)"
            raise ConfigError(*differences, where=where)
        stages.update(own.stages)
    return replace(common, stages=stages)


def check_same_job(engine: BuiltEngine) -> None:
    """On a worker that joins: raise ConfigError when its script is not the job's, before the job learns of it."""
    known = engine.session.coordinator.facts()
    if known is None:
        return  # an etcd that came back without its data
    differences = JobFacts.from_json(known).differences(own_facts(engine))
    if differences:
        where = f"this worker can't join job {engine.session.identity.job!r}, which was started otherwise"
        raise ConfigError(*differences, where=where)


def _kind(spec: Any) -> str:
    kind = getattr(spec, "typename", type(spec))
    return str(getattr(kind, "__name__", kind))


def _fingerprint(module: Any) -> str:
    parameters = [(name, tuple(value.shape), str(value.dtype)) for name, value in module.named_parameters()]
    return hashlib.sha256(repr(parameters).encode()).hexdigest()[:16]
