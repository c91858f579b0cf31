"""DeepSpeed's launcher, and the slots that it starts, as forks of a process that has imported what is slow to import.

All of them run their real code: ``deepspeed.launcher.launch`` and the module that it is given; and so do ``ds_bamboo
run`` and the ``deepspeed`` command under it. Their processes are parents and children as they would be. Only the start
of Python and the imports of torch and deepspeed are left out, which would take 2.5 s for each. Slots start their
workers as commands.
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

from deepspeed_bamboo.testing.fork_server import (
    ForkedProcess,
    ForkRequest,
    ForkServer,
    keep_finalizers_to_this_process,
)

LAUNCHER = "deepspeed.launcher.launch"
RUNNER = "deepspeed.launcher.runner"
WRAPPER = "deepspeed_bamboo.cli.main"
COMMAND = str(Path(sys.executable).with_name("deepspeed"))
_OURS = ("deepspeed_bamboo", "tests")


class ForkedCommand:
    """A launcher or wrapper that was forked, with those methods of ``subprocess.Popen`` that tests use."""

    def __init__(
        self,
        server: ForkServer,
        module: str,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str],
        output: Path,
    ) -> None:
        """Run ``module``, LAUNCHER or WRAPPER, with ``arguments``. All that it starts prints to ``output``, a pipe."""
        target = {LAUNCHER: "launcher", WRAPPER: "wrapper"}[module]
        request = ForkRequest(
            target=f"{__name__}:{target}", arguments=([*arguments], dict(environment)), output=str(output)
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


def runner(arguments: list[str], environment: dict[str, str]) -> None:
    """In the forked process: be DeepSpeed's command, whose launcher is a fork of it."""
    from deepspeed.launcher import runner

    _become(COMMAND, arguments, environment)
    runner.subprocess = SimpleNamespace(Popen=forked)
    runner.main()


def wrapper(arguments: list[str], environment: dict[str, str]) -> int:
    """In the forked process: be ``ds_bamboo``, whose command, if that is DeepSpeed's, is a fork of it."""
    from deepspeed_bamboo.cli import main, run

    _become(WRAPPER, arguments, environment)
    run.subprocess = SimpleNamespace(Popen=forked)  # type: ignore[assignment]
    return main.main(arguments)


def forked(command: Sequence[str], *, env: Mapping[str, str]) -> _Fork | subprocess.Popen[bytes]:
    """In place of ``subprocess.Popen``: ``deepspeed``, or a module that this interpreter runs, is a fork."""
    if command[:3] == [sys.executable, "-u", "-m"]:
        return _Fork(command[3], [*command[4:]], dict(env))
    if command[0] == COMMAND:
        return _Fork(RUNNER, [*command[1:]], dict(env))
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
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # as after exec
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        keep_finalizers_to_this_process()  # temporary folders are their maker's
        be = {LAUNCHER: launcher, RUNNER: runner}.get(module)
        code = guarded(lambda: be(arguments, environment) if be else _slot(module, arguments, environment))
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
