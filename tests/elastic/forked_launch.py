"""DeepSpeed's launcher, and the slots that it starts, as forks of a process that has imported what is slow to import.

All of them run their real code: ``deepspeed.launcher.launch`` and the module that it is given. Their processes are
parents and children as they would be. Only the start of Python and the imports of torch and deepspeed are left out,
which would take 2.5 s for each. Slots start their workers as commands.
"""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

from deepspeed_bamboo.testing.fork_server import ForkedProcess, ForkRequest, ForkServer

LAUNCHER = "deepspeed.launcher.launch"
_OURS = ("deepspeed_bamboo", "tests")


class ForkedCommand:
    """A launcher that was forked, with those methods of ``subprocess.Popen`` that tests use."""

    def __init__(
        self, server: ForkServer, arguments: Sequence[str], *, environment: Mapping[str, str], output: Path
    ) -> None:
        """Calls the launcher's module with ``arguments``. What it and its slots print goes to ``output``, a pipe."""
        request = ForkRequest(
            target=f"{__name__}:launcher", arguments=([*arguments], dict(environment)), output=str(output)
        )
        self._process: ForkedProcess = server.fork(request)
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        return self._process.exit_code(within_seconds=0.0)

    def wait(self, timeout: float = 60.0) -> int:
        """The exit code. Raises TimeoutExpired when it still runs after ``timeout`` seconds."""
        code = self._process.exit_code(within_seconds=timeout)
        if code is None:
            raise subprocess.TimeoutExpired(LAUNCHER, timeout)
        return code

    def send_signal(self, number: int) -> None:
        self._process.signal(number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def launcher(arguments: list[str], environment: dict[str, str]) -> None:
    """In the forked process: be the launcher, whose slots are forks of it."""
    from deepspeed.launcher import launch

    _become(LAUNCHER, arguments, environment)
    launch.subprocess = SimpleNamespace(Popen=forked)
    launch.main()


def forked(command: list[str], *, env: Mapping[str, str]) -> _Fork | subprocess.Popen[bytes]:
    """In place of ``subprocess.Popen``: a module run by this interpreter is a fork of this process."""
    if command[:3] == [sys.executable, "-u", "-m"]:
        return _Fork(command[3], command[4:], dict(env))
    return subprocess.Popen(command, env=env)


class _Fork:
    """What DeepSpeed's launcher and its command use of ``subprocess.Popen``."""

    def __init__(self, module: str, arguments: list[str], environment: dict[str, str]) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            _run_module(module, arguments, environment)

    def poll(self) -> int | None:
        return self._collect(os.WNOHANG)

    def wait(self) -> int | None:
        return self._collect(0)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def _collect(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode


def _run_module(module: str, arguments: list[str], environment: dict[str, str]) -> NoReturn:
    """``python -u -m MODULE ARGUMENTS...`` in this process, which ends with it."""
    from deepspeed_bamboo.elastic.bootstrap import guarded, run_exit_handlers

    code = 1
    try:
        code = guarded(
            lambda: launcher(arguments, environment) if module == LAUNCHER else _slot(module, arguments, environment)
        )
        run_exit_handlers()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _slot(module: str, arguments: list[str], environment: dict[str, str]) -> None:
    _become(module, arguments, environment)
    for name in [name for name in sys.modules if name.partition(".")[0] in _OURS]:
        del sys.modules[name]  # what they find out when they are imported, their parent for instance, is another's
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _become(module: str, arguments: list[str], environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [module, *arguments]
