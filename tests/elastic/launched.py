"""A job under DeepSpeed's real launcher, with what it prints."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from deepspeed_bamboo.testing.fork_server import ForkServer
from tests.elastic.forked_launch import COMMAND, LAUNCHER, WRAPPER, ForkedCommand

REPOSITORY = Path(__file__).parents[2]

PRELUDE = """
    import os, signal, sys, time
    from tests.elastic.workers import FakeTraining
    rank = int(os.environ["RANK"])
"""


NO_RESTARTS = {"bamboo": {"topology": {"max_restarts": 0}}}


# Of its own for each pytest worker: one launcher's first slot listens there.
DEFAULT_PORT = 29511 + int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))


class LaunchedJob:
    """``python -m deepspeed.launcher.launch ... --module tests.elastic.fast_launch train.py``, as the command runs it.

    ``launcher``: the beginning of another command. ``module``: what starts the script, if not the script itself.
    One launcher of several ``nodes`` is made by giving its ``node_rank``.
    With ``command`` it is ``deepspeed ...`` itself; with ``run``, the options of ``ds_bamboo run``, under that. It
    leads a process group, so that Ctrl-C can be sent to it.
    With ``server`` a launcher, or ``ds_bamboo run``, is forked with all that it starts (``forked_launch.py``), which
    takes a fifth of the time.
    """

    def __init__(
        self,
        folder: Path,
        script: str,
        *,
        slots: int = 2,
        config: Mapping[str, object] | None = None,
        options: tuple[str, ...] = (),
        arguments: tuple[str, ...] = (),
        command: bool = False,
        run: tuple[str, ...] | None = None,
        nodes: int = 1,
        node_rank: int = 0,
        master_port: int | None = None,
        environment: Mapping[str, str] | None = None,
        launcher: tuple[str, ...] | None = None,
        module: tuple[str, ...] = ("--module", "tests.elastic.fast_launch"),
        server: ForkServer | None = None,
    ) -> None:
        master_port = DEFAULT_PORT if master_port is None else master_port
        folder.mkdir(exist_ok=True)
        file = folder / "train.py"
        file.write_text(textwrap.dedent(PRELUDE) + textwrap.dedent(script), encoding="utf-8")
        settings = folder / "ds.json"
        settings.write_text(json.dumps(NO_RESTARTS if config is None else config), encoding="utf-8")
        tail = [*module, *options, str(file), "--deepspeed_config", str(settings)]
        if launcher is not None:
            head = [*launcher]
        elif command:
            head = [COMMAND]
            if run is not None:
                head = [sys.executable, "-u", "-m", WRAPPER, "run", *run, "--", COMMAND]
            head += ["--num_accelerators", str(slots), "--master_port", str(master_port)]
        else:
            world = {f"node{number}": list(range(slots)) for number in range(nodes)}
            encoded = base64.urlsafe_b64encode(json.dumps(world).encode()).decode()
            head = [sys.executable, "-u", "-m", LAUNCHER, f"--world_info={encoded}"]
            head += [f"--node_rank={node_rank}", "--master_addr=127.0.0.1", f"--master_port={master_port}"]
        line = [*head, *tail, *arguments]
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), **(environment or {})}
        # A named pipe: its reader gets the first writer's lines, and its end when nobody holds it open any more.
        self._pipe = folder / "output"
        self._pipe.unlink(missing_ok=True)
        os.mkfifo(self._pipe)
        self._lines: list[str] = []
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.process: subprocess.Popen[bytes] | ForkedCommand
        if server is None:
            with self._pipe.open("wb") as output:
                self.process = subprocess.Popen(
                    line,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    cwd=REPOSITORY,
                    env=environment,
                )
        else:
            assert line[:3] == [sys.executable, "-u", "-m"], f"this can't be forked: {line}"
            self.process = ForkedCommand(server, line[3], line[4:], environment=environment, output=self._pipe)

    def __enter__(self) -> LaunchedJob:
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    @property
    def output(self) -> str:
        with self._changed:
            return "".join(self._lines)

    def slot(self, rank: int) -> int:
        """The process of a slot, as the launcher says."""
        pattern = rf"process (\d+) spawned with command: .*--local_rank={rank}'"
        found = re.search(pattern, self.output)
        assert found is not None, f"{pattern} is not in\n{self.output}"
        return int(found[1])

    def wait_for(self, text: str, *, times: int = 1, within_seconds: float = 120) -> None:
        """Until ``text`` was printed so often. Fails the test otherwise."""
        deadline = time.monotonic() + within_seconds
        with self._changed:
            while "".join(self._lines).count(text) < times:
                remaining = deadline - time.monotonic()
                assert remaining > 0, f"waited for {text!r} in vain:\n{''.join(self._lines)}"
                self._changed.wait(remaining)

    def wait(self, *, within_seconds: float) -> int:
        """The launcher's exit code, once nobody holds its output open any more."""
        start = time.monotonic()
        try:
            code = self.process.wait(timeout=within_seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the launcher still runs:\n{self.output}") from None
        self._reader.join(max(0.0, within_seconds - (time.monotonic() - start)))
        assert not self._reader.is_alive(), f"something still holds the output open:\n{self.output}"
        return code

    def _read(self) -> None:
        with self._pipe.open(encoding="utf-8") as output:
            for line in output:
                with self._changed:
                    self._lines.append(line)
                    self._changed.notify_all()
