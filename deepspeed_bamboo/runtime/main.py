"""Runs a user's DeepSpeed script in a worker process: ``python -m deepspeed_bamboo.runtime.main -- train.py ...``.

Started by the elastic agent. The script runs as ``__main__`` and unmodified: its ``deepspeed.initialize`` is
this plugin's. When it ends, its engines leave the job; when it raises, the traceback goes to the agent.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import deepspeed
import torch
from deepspeed.utils import logger

import deepspeed_bamboo
from deepspeed_bamboo import news
from deepspeed_bamboo.coordination import CoordinatorUnavailable, JobFailure, connect
from deepspeed_bamboo.device_queues import queue_problems
from deepspeed_bamboo.errors import DrainedError, ExpelledError, JobFailedError, JobStoppedError
from deepspeed_bamboo.protocol import (
    ERROR_FILE,
    EXIT_DRAINED,
    EXIT_EXPELLED,
    EXIT_JOB_FAILED,
    EXIT_USER_ERROR,
    JOINING,
    OTHER_ENGINES,
    PIPELINES,
)
from deepspeed_bamboo.runtime.initialize import initialize_with, is_bamboo_engine
from deepspeed_bamboo.runtime.job import garbage
from deepspeed_bamboo.runtime.job.meeting import guarded_meetings
from deepspeed_bamboo.runtime.job.no_room import end_for_want_of_machines, is_for_want_of_machines
from deepspeed_bamboo.runtime.job.other_engines import watched
from deepspeed_bamboo.runtime.stock.logical_world import LogicalWorld
from deepspeed_bamboo.runtime.stock.patches.entry_points import initialize_function
from deepspeed_bamboo.runtime.stock.patches.shared_memory_op import leave_out_shared_memory_op
from deepspeed_bamboo.runtime.stock.script_groups import ScriptGroups
from deepspeed_bamboo.runtime.stock.symbols import require_symbols

if TYPE_CHECKING:
    from deepspeed_bamboo.runtime.engine import BambooPipelineEngine

_NOTHING_MADE = "the script has ended and made no engine of the plugin's, so nothing in it was protected from a loss"
_NOT_FOR_SCRIPTS = (EXIT_JOB_FAILED, EXIT_EXPELLED, EXIT_DRAINED)  # they tell the agent something else


def main(argv: Sequence[str] | None = None) -> int:
    """Run the script named after ``--`` with its arguments. Returns the exit code of this worker."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["--"]:
        arguments = arguments[1:]
    if not arguments:
        raise SystemExit("usage: python -m deepspeed_bamboo.runtime.main -- SCRIPT [ARGUMENTS]")
    script, sys.argv = arguments[0], arguments
    sys.path.insert(0, str(Path(script).resolve().parent))
    return supervised(lambda: runpy.run_path(script, run_name="__main__"))


def _prepare_nccl() -> None:
    """Settings under which communicators can be aborted without ending the process (architecture 8)."""
    for name, value in (
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"),
        ("TORCH_NCCL_ENABLE_MONITORING", "0"),
        ("NCCL_NVLS_ENABLE", "0"),
    ):
        os.environ.setdefault(name, value)
    problems = queue_problems(os.environ)
    if problems and torch.cuda.is_available():
        for problem, remedy in problems:
            logger.warning(f"{problem}; {remedy}")


def supervised(function: Callable[[], Any]) -> int:
    """Call ``function`` with the plugin in place of ``deepspeed.initialize``; close its engines afterwards.

    Returns the worker's exit code: 0, the script's own, or one of the constants of this module. An exception
    of the script is printed, written to the file named by BAMBOO_ERROR_FILE, and ends the job.
    """
    leave_out_shared_memory_op()
    _prepare_nccl()
    garbage.set_aside_imports()
    engines: list[BambooPipelineEngine] = []
    groups = ScriptGroups()
    stock = deepspeed.initialize

    def initialize(*args: Any, **kwargs: Any) -> Any:
        result = initialize_with(stock, groups, *args, **kwargs)
        if is_bamboo_engine(result[0]):
            engines.append(result[0])
        return result

    deepspeed_bamboo.initialize = initialize
    with initialize_function(initialize):
        return _run(function, engines, groups)


def _run(function: Callable[[], Any], engines: Sequence[BambooPipelineEngine], groups: ScriptGroups) -> int:
    """Call ``function``, which adds to ``engines``, and let them leave the job. Returns the worker's exit code."""
    try:
        world = LogicalWorld(pipelines=_pipelines_told, groups=groups)
        with (
            guarded_meetings(os.environ),
            watched(is_bamboo_engine),
            groups.installed(),
            _joining_if_told(groups),
            world.watching(),
        ):
            code, last_words = _exit_code(function)
        refused = next((engine.refused for engine in engines if engine.refused is not None), None)
        if code == 0 and refused is not None:
            raise refused
        if code == 0 and not engines and os.environ.get(OTHER_ENGINES):
            news.tell(_NOTHING_MADE, who=f"rank {os.environ.get('RANK', '?')}")
        for engine in engines:
            if code == 0:
                engine.close()
            else:
                _report_failure(engine, last_words)
        return code
    except DrainedError as error:
        news.say(error)
        for engine in engines:
            engine.leave()
        return EXIT_DRAINED
    except JobFailedError as error:
        news.say(error)
        return EXIT_JOB_FAILED
    except ExpelledError as error:
        news.say(error)
        # Peers have gone on; nothing of this process may reach them any more, exit handlers included.
        os._exit(EXIT_EXPELLED)
    except Exception as error:  # noqa: BLE001 - the user's bug, whatever it is: reported, then the job ends
        for engine in engines:
            if is_for_want_of_machines(error, last_loss=engine.failover.conclusion):
                code = end_for_want_of_machines(engine.session, error)
                return os._exit(code) if code == EXIT_EXPELLED else code
        cause = next((why for engine in engines if (why := engine.cause_of(error)) is not None), None)
        if cause is not None:
            cause.__cause__, error = error, cause
        text = "".join(traceback.format_exception(error))
        _hand_over(text)
        for engine in engines:
            _report_failure(engine, text, headline=_headline(error))
        return EXIT_USER_ERROR


@contextlib.contextmanager
def _joining_if_told(groups: ScriptGroups) -> Iterator[None]:
    """In a worker that comes to a running job, the script sees the job's process group without taking part in it."""
    if os.environ.get(JOINING) != "1":
        yield
        return
    require_symbols()
    from deepspeed_bamboo.runtime.membership.joining import alone_in_the_group

    coordinator = connect(os.environ)
    with contextlib.closing(coordinator), alone_in_the_group(os.environ, coordinator, groups=groups):
        yield


def _pipelines_told() -> int | None:
    """``topology.pipelines``, as the agent read it: a script makes its module before it passes its configuration."""
    told = os.environ.get(PIPELINES, "")
    return int(told) if told else None


def _exit_code(function: Callable[[], Any]) -> tuple[int, str]:
    """How the script ended: its exit code, and what to tell the others when that is not 0."""
    try:
        function()
    except JobStoppedError as stopped:
        news.say(stopped)
    except SystemExit as leaving:
        if leaving.code is None or isinstance(leaving.code, int):
            code = EXIT_USER_ERROR if leaving.code in _NOT_FOR_SCRIPTS else leaving.code or 0
            return code, f"its script ended itself with exit code {leaving.code}"
        news.say(leaving.code)
        return EXIT_USER_ERROR, f"its script ended itself: {leaving.code}"
    return 0, ""


def _headline(error: Exception) -> str:
    """The class of an error and what it says first; a heading has no meaning without what follows it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def _report_failure(engine: BambooPipelineEngine, text: str, *, headline: str | None = None) -> None:
    """Tell the job before this process ends, so that no peer takes its end for the loss of a node."""
    session = engine.session
    if session.closed or session.interruption.active is None:
        return  # over, or a worker that was still to be taken in, whose agent reports it; the job continues without it
    failure = JobFailure(session.worker, "user_error", headline or text.strip().splitlines()[-1], text)
    with contextlib.suppress(CoordinatorUnavailable):
        session.coordinator.fail(failure)


def _hand_over(text: str) -> None:
    """Give the traceback to the agent, which prints it once for the whole job; without an agent, print it."""
    path = os.environ.get(ERROR_FILE)
    if path:
        Path(path).write_text(text, encoding="utf-8")
    else:
        news.say(text)


if __name__ == "__main__":
    sys.exit(main())
