"""Every exception that deepspeed_bamboo raises on purpose.

    BambooError
    ├── ConfigError         a setting, a fault script or an argument that can't be used (also a ValueError)
    ├── EventLogError       event files that contradict each other or can't be read
    ├── UpgradeError        private parts of DeepSpeed or torch that the plugin needs are missing
    ├── ModelError          a model whose stages can't be connected (a user's bug, never a lost node)
    ├── MemoryLimitError    redundancy needs more memory than the configuration allows
    ├── MessageError        bytes from a connection or from etcd that are no message of this job (also a ValueError)
    ├── UnsendableError     a value that can't be sent to another worker (also a ValueError)
    ├── ShadowError         a shadow that differs from its owner (debug_check_shadows)
    ├── JobFailedError      another worker ended the job; names it and its cause
    ├── ExpelledError       this worker is no longer part of the job; its process has to end
    ├── DrainedError        this worker has left the job on request; its process ends, and nothing is lost
    └── JobStoppedError     the job was asked to stop, and has reached a boundary

Messages for users carry three things: the value, the rule it breaks, and the remedy.
"""

from __future__ import annotations

from collections.abc import Sequence


class BambooError(Exception):
    """Root of the tree; catch it to catch whatever deepspeed_bamboo raises on purpose."""


class ConfigError(BambooError, ValueError):
    """The user's settings can't be used. Raised before anything starts; lists every problem."""

    def __init__(self, *problems: str, where: str = "") -> None:
        """``problems``: one sentence each (at least one). ``where``: the file or section they are in."""
        self.problems: tuple[str, ...] = problems
        self.where = where
        super().__init__(_list_problems(problems, where=where))


class EventLogError(BambooError):
    """Workers wrote different things about the same step, or a line in an event file is broken."""


class UpgradeError(BambooError):
    """This DeepSpeed or torch lacks private names that the plugin needs. Raised before anything is built."""

    def __init__(self, *missing: str, installed: str, tried: str) -> None:
        """``missing``: where each name should be, and why it is needed (at least one). The rest: versions."""
        self.missing: tuple[str, ...] = missing
        names = "".join(f"\n  - {name}" for name in missing)
        super().__init__(
            f"{installed} lacks names that the plugin needs; it was tried with {tried}. Install one of those, or set "
            f'"bamboo": {{"enabled": false}}. Missing:{names}'
        )


class ModelError(BambooError):
    """What a stage returns or ignores can't travel between stages. Names stage, slot and dtype."""


class MemoryLimitError(BambooError):
    """What redundant forwards keep exceeds ``bamboo.redundancy.memory_limit_gigabytes``."""


class CheckpointError(BambooError):
    """A checkpoint can't be written, read or trusted, or workers read it differently."""


class MessageError(BambooError, ValueError):
    """Bytes from a connection or from etcd are no message of this job. They were not used."""


class UnsendableError(BambooError, ValueError):
    """A value can't be sent to another worker, because it is neither plain data nor a tensor. Names its type."""


class ShadowError(BambooError):
    """A shadow is not bitwise equal to its owner. Names coordinate, parameter and both workers."""


class JobFailedError(BambooError):
    """The job has ended with a failure on worker ``origin``, not on this one."""

    def __init__(self, message: str, *, origin: str) -> None:
        super().__init__(f"the job failed on worker {origin}: {message}")
        self.origin = origin


class ExpelledError(BambooError):
    """The others have continued without this worker, because it was silent for too long. Its state no longer counts."""


class DrainedError(BambooError):
    """The job has left this worker's node. Everything that the worker held is on other workers now."""


class JobStoppedError(BambooError):
    """The job was asked to stop. Every worker's ``train_batch`` raises this at the same iteration boundary."""


def _list_problems(problems: Sequence[str], *, where: str) -> str:
    if len(problems) == 1:
        return f"{where}: {problems[0]}" if where else problems[0]
    head = f"{len(problems)} problems in {where}:" if where else f"{len(problems)} problems:"
    return "\n".join([head, *(f"  - {problem}" for problem in problems)])
