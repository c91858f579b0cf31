"""Makes the process that some launcher has started for a script this slot's agent, from within that script."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from deepspeed_bamboo.elastic.errors import LaunchError
from deepspeed_bamboo.elastic.schedulers import ranks_of_scheduler
from deepspeed_bamboo.protocol import BY_IMPORT, OPTIONS, RUN_PLAIN, WORKER

_LAUNCH = "deepspeed_bamboo.launch"


def become_agent() -> None:
    """Run the launch module in this very process, with the script that this is; does not return then.

    Returns at once in a worker, where the plugin is off, and without a launcher. Raises LaunchError where the script
    was not started by its file.
    """
    if not is_for_agent(os.environ):
        return
    line = agent_line(sys.argv, main=sys.modules["__main__"], options=os.environ.get(OPTIONS, ""))
    os.environ[BY_IMPORT] = "1"
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-u", "-m", _LAUNCH, *line])


def is_for_agent(environment: Mapping[str, str]) -> bool:
    """Whether a launcher has started this process, and neither an agent, nor the launch module with the plugin off."""
    launched = "RANK" in environment or bool(ranks_of_scheduler(environment))
    return launched and WORKER not in environment and RUN_PLAIN not in environment


def agent_line(argv: Sequence[str], *, main: Any, options: str) -> list[str]:
    """The arguments of the launch module for the script that was started with ``argv``; ``options``: further ones.

    Raises LaunchError where the script was not started by its file.
    """
    script, module = getattr(main, "__file__", None), getattr(main, "__spec__", None)
    if script is None or module is not None:
        raise LaunchError(
            "import deepspeed_bamboo.launched works in a script that was started by its file, and this is "
            f"{'no file' if module is None else f'module {module.name}'}; start its file, or use --module {_LAUNCH}"
        )
    arguments = list(argv[1:])
    # DeepSpeed's launcher passes it first, and the launch module passes it on.
    first = [arguments.pop(0)] if arguments and arguments[0].startswith("--local_rank=") else []
    return [*first, *shlex.split(options), script, *arguments]
