"""How an agent starts its worker in tests and sweeps: as a child of a fork server."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path

from torch.distributed.elastic.multiprocessing import PContext, ProcessFailure, RunProcsResult

from deepspeed_bamboo.elastic.starting import QuietLogs
from deepspeed_bamboo.testing.fork_server import ForkedProcess, ForkRequest, fork

_EXIT_NEWS_SECONDS = 2.0


class ForkedContext(PContext):
    """One forked worker as torch's agents see their processes."""

    def __init__(self, address: str, request: ForkRequest) -> None:
        super().__init__(
            name="bamboo",
            entrypoint=request.target,
            args={0: request.arguments},
            envs={0: request.environment},
            logs_specs=QuietLogs(),
        )
        self._address = address
        self._request = request
        self._process: ForkedProcess | None = None

    def _start(self) -> None:
        self._process = fork(self._address, self._request)

    def _poll(self) -> RunProcsResult | None:
        code = self._code(within_seconds=0.0)
        if code is None:
            return None
        if code == 0:
            return RunProcsResult(return_values={0: None})
        return RunProcsResult(failures={0: ProcessFailure(0, self.pids()[0], code, error_file="")})

    def pids(self) -> dict[int, int]:
        return {} if self._process is None else {0: self._process.pid}

    def _close(self, death_sig: signal.Signals, timeout: int = 30) -> None:
        if self._process is None or self._code(within_seconds=0.0) is not None:
            return
        self._process.signal(death_sig)
        if self._code(within_seconds=timeout) is None:
            self._process.signal(signal.SIGKILL)
            self._code(within_seconds=_EXIT_NEWS_SECONDS)

    def _code(self, *, within_seconds: float) -> int | None:
        return None if self._process is None else self._process.exit_code(within_seconds=within_seconds)


class ForkStarter:
    """Has the fork server at ``address`` call ``target(arguments)`` as the worker, with output to a file.

    The worker's process id is appended to ``pid_file``, one line for each attempt.
    """

    def __init__(
        self,
        address: str,
        *,
        target: str,
        arguments: list[str],
        output: str,
        pid_file: str,
        inherited: Mapping[str, str],
    ) -> None:
        """``inherited``: what a child of the agent would have from it, and one of the fork server has not."""
        self._address = address
        self._inherited = dict(inherited)
        self._pid_file = Path(pid_file)
        self._request = ForkRequest(target=target, arguments=(arguments,), output=output)

    def start(self, environment: Mapping[str, str]) -> PContext:
        request = ForkRequest(
            target=self._request.target,
            arguments=self._request.arguments,
            environment={**self._inherited, **environment},
            output=self._request.output,
        )
        context = ForkedContext(self._address, request)
        context.start()
        with self._pid_file.open("a", encoding="utf-8") as file:
            file.write(f"{context.pids()[0]}\n")
        return context
