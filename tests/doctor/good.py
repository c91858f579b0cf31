"""A machine, and a job, in which nothing is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepspeed_bamboo.config.section import BambooConfig
from deepspeed_bamboo.doctor.machine import Gpu
from deepspeed_bamboo.doctor.subject import Host, ModelFacts, Subject

GIB = 1 << 30


@dataclass(frozen=True)
class FakeMachine:
    """Says what it is given; by default four large GPUs and all that is needed."""

    versions: Mapping[str, str] = field(
        default_factory=lambda: {"torch": "2.13.0+cu130", "deepspeed": "0.19.8", "nvidia-nccl-cu13": "2.29.3"}
    )
    python_version: tuple[int, ...] = (3, 11, 7)
    cards: tuple[Gpu, ...] | None = (Gpu("H200", 139 * GIB, GIB),) * 4
    names: Mapping[str, str] = field(default_factory=lambda: {f"n{index}": f"10.0.0.{index + 1}" for index in range(4)})
    known_interfaces: frozenset[str] = frozenset({"lo", "eth0"})
    used_ports: frozenset[int] = frozenset()
    shared_bytes: int | None = 8 * GIB
    synchronised: bool | None = True
    wrong_secret: str | None = None
    locks: tuple[tuple[Path, float], ...] = ((Path("/cache/py311_cu130/cpu_adam/lock"), 60.0),)

    def python(self) -> tuple[int, ...]:
        return self.python_version

    def version(self, package: str) -> str | None:
        return self.versions.get(package)

    def gpus(self) -> tuple[Gpu, ...] | None:
        return self.cards

    def interfaces(self) -> frozenset[str]:
        return self.known_interfaces

    def addresses(self) -> frozenset[str]:
        return frozenset({"127.0.0.1", "10.0.0.1"})

    def host_name(self) -> str:
        return "n0.cluster"

    def resolve(self, name: str) -> str | None:
        return self.names.get(name)

    def port_is_free(self, port: int) -> bool:
        return port not in self.used_ports

    def shared_memory_bytes(self) -> int | None:
        return self.shared_bytes

    def clock_is_synchronised(self) -> bool | None:
        return self.synchronised

    def secret_problem(self, environment: Mapping[str, str]) -> str | None:
        return self.wrong_secret

    def build_locks(self, environment: Mapping[str, str]) -> tuple[tuple[Path, float], ...]:
        return self.locks


SETTINGS = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 32,
    "bf16": {"enabled": True},
    "optimizer": {"type": "Adam", "params": {"lr": 1e-4}},
}
MODEL = ModelFacts("gpt2-xl", layers=52, stage_parameters=(400_000_000,) * 4)


def section(**changes: Any) -> BambooConfig:
    """Of a job over several machines, but for its etcd and its bucket; ``changes`` by section."""
    given: dict[str, Any] = {"notices": {"source": "none"}, "topology": {"zones": "a"}}
    return BambooConfig.model_validate(given | changes)


def subject(**changes: Any) -> Subject:
    """Four machines of four GPUs, four stages."""
    given: dict[str, Any] = {
        "machine": FakeMachine(),
        "settings": SETTINGS,
        "section": section(),
        "hosts": tuple(Host(f"n{index}", 4) for index in range(4)),
        "stages": 4,
        "model": MODEL,
    }
    return Subject(**(given | changes))
