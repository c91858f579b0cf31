"""``ds_bamboo run -- deepspeed ...``: repeats a command until its job is complete, or another run would not help."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from deepspeed_bamboo.cli.unattended import handling
from deepspeed_bamboo.errors import BambooError
from deepspeed_bamboo.options import up_to_eleven_days
from deepspeed_bamboo.protocol import EXIT_TRY_AGAIN, OUTCOME, SINCE

_DESCRIPTION = """\
Runs a deepspeed command, and repeats it whenever machines were missing and its
script did nothing wrong: too much was lost at once, an agent or a launcher was
killed, slots disappeared while it started, etcd did not answer yet. The job
then continues from its last checkpoint (bamboo.checkpoint.dir). Where each
machine has a launcher of its own, start this command on each: one starts the
job, and the others wait until it trains, and join it.

Exit codes: 0 the job is complete (also by other machines, or it continues
without this one, which has left it); 75 machines are still missing after
several runs, so try the same command later; 128 + signal if this command was
interrupted; otherwise the exit code of the script or of its start, which
failed: another run would not help.
"""
_USAGE = """ds_bamboo run [options] -- deepspeed ...
                     --module deepspeed_bamboo.launch --job NAME train.py ..."""
_PAUSE_SECONDS, _FRUITLESS = 10.0, 5
_END_SECONDS = 60.0


def add_parser(subparsers: Any) -> None:
    """Register the command."""
    run = subparsers.add_parser(
        "run",
        help="run a deepspeed command, again and again until its job is complete",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage=_USAGE,
    )
    run.add_argument("--once", action="store_true", help="run it once; the exit code says whether to repeat it")
    run.add_argument(
        "--pause-seconds",
        type=up_to_eleven_days,
        default=_PAUSE_SECONDS,
        metavar="S",
        help=f"pause before the next run, doubled without a new step (default: {_PAUSE_SECONDS:g})",
    )
    run.add_argument(
        "--fruitless",
        type=int,
        default=_FRUITLESS,
        metavar="N",
        help=f"give up after N runs in a row without a new step (default: {_FRUITLESS})",
    )
    run.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="the command with its arguments")
    run.set_defaults(run=run_command)


def run_command(arguments: argparse.Namespace) -> int:
    """Run until the job is complete or given up. Returns the exit code. Raises BambooError for no command."""
    from deepspeed_bamboo.elastic.judging import Patience, judge
    from deepspeed_bamboo.elastic.outcome import read_notes
    from deepspeed_bamboo.news import tell

    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if not command:
        raise BambooError("there is no command to run; write it after two dashes: ds_bamboo run -- deepspeed ...")
    if arguments.fruitless < 1:
        raise BambooError(f"--fruitless {arguments.fruitless}: it must be 1 or more")
    patience = Patience(pause_seconds=arguments.pause_seconds, fruitless_limit=arguments.fruitless)
    inherited, began, first = os.environ.get(SINCE), f"{time.time():.3f}", True
    with _signals() as heard:
        while True:
            with tempfile.TemporaryDirectory(prefix="bamboo-run-") as folder:
                # The job of before may still be ending; only what a repeat of this command finds complete is its own.
                since = inherited or ("" if first else began)
                code, first = _run_once(command, {OUTCOME: folder, SINCE: since}, heard), False
                notes = read_notes(Path(folder))
            verdict = judge(code, notes, signalled=heard.number)
            if verdict.kind != "again" or arguments.once:
                tell(f"{verdict.kind}, exit code {verdict.code}: {verdict.reason}", who="run")
                return verdict.code
            pause = patience.next_pause_seconds(notes)
            if pause is None:
                tell(f"given up after {patience.fruitless} runs without a new step: {verdict.reason}", who="run")
                return EXIT_TRY_AGAIN
            tell(f"again in {pause:g} s: {verdict.reason}", who="run")
            if heard.wait(pause):
                return 128 + (heard.number or 0)


class _Heard:
    """The first signal that was to end this process."""

    def __init__(self) -> None:
        self.number: int | None = None
        self.child: subprocess.Popen[bytes] | None = None
        self._event = threading.Event()

    def hear(self, number: int, frame: object) -> None:
        self.number = self.number or number
        self._event.set()
        if self.child is not None and not (number == signal.SIGINT and _has_the_terminal()):
            with contextlib.suppress(ProcessLookupError):
                self.child.send_signal(number)

    def wait(self, seconds: float) -> bool:
        """Whether one came in that time."""
        return self._event.wait(seconds)


def _has_the_terminal() -> bool:
    """Whether a Ctrl-C reaches the command by itself; told of it twice, DeepSpeed's would kill without a word."""
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False


@contextlib.contextmanager
def _signals() -> Iterator[_Heard]:
    """Pass what would end this process to the command, which ends its job in good order, and end after it."""
    heard = _Heard()
    with handling(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, by=heard.hear):
        yield heard


def _run_once(command: Sequence[str], variables: Mapping[str, str], heard: _Heard) -> int:
    """The command's exit code, negative for a signal, once its slots have ended, too."""
    if heard.number is not None:
        return -heard.number
    try:
        child = subprocess.Popen(command, env={**os.environ, **variables})
    except OSError as error:
        raise BambooError(
            f"{command[0]!r} can't be run ({error.strerror}); write the command as you would without"
        ) from error
    heard.child = child
    try:
        code = child.wait()
    finally:
        heard.child = None
    _wait_for_slots(variables[OUTCOME])
    sys.stdout.flush()
    return code


def _wait_for_slots(folder: str) -> None:
    """A launcher that was killed ends before its slots, which have a word to say, and ports to give back."""
    from deepspeed_bamboo.elastic.outcome import slots_running

    pause = threading.Event()
    for _ in range(int(_END_SECONDS / 0.1)):
        if not slots_running(Path(folder)):
            return
        pause.wait(0.1)
