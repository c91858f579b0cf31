"""How an agent starts its worker: as a command, through torch's process contexts."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Protocol

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, PContext, start_processes

_BOOTSTRAP = "deepspeed_bamboo.elastic.bootstrap"


class WorkerStarter(Protocol):
    """Starts one worker. It must be a session of its own, run ``bootstrap.guarded``, and see ``environment``."""

    def start(self, environment: Mapping[str, str]) -> PContext:
        """A running worker; ``environment`` comes on top of this process's own."""


class QuietLogs(LogsSpecs):
    """Neither folders nor redirections: the worker writes where its agent writes, so a terminal stays one."""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        nowhere = dict.fromkeys(envs, "")
        return LogsDest(stdouts=nowhere, stderrs=nowhere, error_files=nowhere)

    @property
    def root_log_dir(self) -> str:
        return ""


class CommandStarter:
    """Runs ``python -u -m MODULE ARGUMENTS...``; the arguments are the same for every attempt."""

    def __init__(self, module: str, arguments: Sequence[str]) -> None:
        self._arguments = ("-u", "-m", _BOOTSTRAP, module, *arguments)

    def start(self, environment: Mapping[str, str]) -> PContext:
        return start_processes(
            name="bamboo",
            entrypoint=sys.executable,
            args={0: self._arguments},
            envs={0: dict(environment)},
            logs_specs=QuietLogs(),
        )


def quiet_grpc(environment: Mapping[str, str]) -> dict[str, str]:
    """What keeps gRPC from complaining in a worker each time that its script forks, to read data for instance.

    A child has no use for the parent's connections to etcd, which is what gRPC's handlers are about. Whatever the
    user has set stays.
    """
    wanted = {"GRPC_ENABLE_FORK_SUPPORT": "0", "GRPC_VERBOSITY": "ERROR"}
    return {name: value for name, value in wanted.items() if name not in environment}
