"""What is examined: a configuration, the hosts, a model, this machine."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepspeed_bamboo.config.section import BambooConfig
from deepspeed_bamboo.core.seating import logical_grid
from deepspeed_bamboo.doctor.machine import Gpu, Machine
from deepspeed_bamboo.errors import ConfigError
from deepspeed_bamboo.text_files import UnreadableError, text_of

_HOST = re.compile(r"(\S+)\s+slots=([0-9]+)")
_SLOT_DIGITS = 4  # of one machine
_SHOWN = 200
VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Host:
    """A line of a host file."""

    name: str
    slots: int


@dataclass(frozen=True)
class ModelFacts:
    """A model in stages: how many layers it has, the parameters of each stage, and the bytes that its forward of one
    sample in fp32 keeps for the backward (0: not known)."""

    name: str
    layers: int
    stage_parameters: tuple[int, ...]
    stage_activations: tuple[int, ...] = ()


@dataclass(frozen=True)
class Subject:
    """What checks look at. ``hosts`` empty: this machine alone. ``stages``: None for as many as there are workers."""

    machine: Machine
    environment: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    section: BambooConfig = field(default_factory=BambooConfig)
    hosts: tuple[Host, ...] = ()
    stages: int | None = None
    model: ModelFacts | None = None

    @property
    def on_cpu(self) -> bool:
        """Whether DeepSpeed is to train without GPUs."""
        return self.environment.get("DS_ACCELERATOR") == "cpu"

    @property
    def gpus(self) -> dict[int, Gpu] | None:
        """Those that a job here would use, by number; None where they can't be asked.

        DeepSpeed's launcher goes by CUDA_VISIBLE_DEVICES, and CUDA takes its numbers up to the first that is none. Of
        names in place of numbers nothing is known but how many there are.
        """
        found = self.machine.gpus()
        chosen = self.environment.get(VISIBLE)
        if found is None or chosen is None:
            return None if found is None else dict(enumerate(found))
        parts = [part.strip() for part in chosen.split(",") if part.strip()]
        if any(not part.lstrip("-").isdigit() for part in parts):
            return dict(list(enumerate(found))[: len(parts)])
        there = itertools.takewhile(lambda number: 0 <= number < len(found), map(int, parts))
        return {number: found[number] for number in there}

    @property
    def workers(self) -> int | None:
        """How many there will be; None where nothing says so."""
        if self.hosts:
            return sum(host.slots for host in self.hosts)
        gpus = None if self.on_cpu else self.gpus
        return len(gpus) if gpus else None

    @property
    def grid(self) -> tuple[int, int] | None:
        """Pipelines and stages; None where nothing says how many workers there will be."""
        workers, stages = self.workers, self.stages or self.workers
        if workers is None or stages is None:
            return None
        grid = logical_grid(stages=stages, workers=workers, pipelines=self.section.topology.pipelines)
        return grid.pipelines, grid.stages


def read_hosts(path: Path) -> tuple[Host, ...]:
    """The lines ``NAME slots=N`` of DeepSpeed's host file. Raises ConfigError for another line, and for no file."""
    try:
        lines = text_of(path).splitlines()
    except UnreadableError as error:
        raise ConfigError(f"{error}; name the host file", where=str(path)) from error
    hosts = []
    for number, line in enumerate(lines, start=1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        found = _HOST.fullmatch(text)
        if found is None or len(found[2]) > _SLOT_DIGITS or not int(found[2]):
            shown = repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...")
            raise ConfigError(f"line {number} is {shown}; write NAME slots=N, with N from 1 to 9999", where=str(path))
        hosts.append(Host(found[1], int(found[2])))
    if not hosts:
        raise ConfigError("names no host; write a line NAME slots=N for each", where=str(path))
    return tuple(hosts)
