"""The command line of a slot: ``[--local_rank=N] [--job NAME] [--bamboo_config FILE] SCRIPT [ARGUMENTS]``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from deepspeed_bamboo.options import filled

_DESCRIPTION = """\
Runs an unmodified DeepSpeed pipeline script so that it survives the loss of any of its machines:

    deepspeed [launcher flags] --module deepspeed_bamboo.launch [--job NAME] train.py [its arguments]

The settings are the "bamboo" section of the script's DeepSpeed JSON. Without that section, or with
"enabled": false in it, the script runs as it would without this module.

A command with the name of a running job, on this machine or at the same etcd, joins that job.
"""


@dataclass(frozen=True)
class CommandLine:
    """``local_rank`` is what the launcher passed, if it did. ``job`` is None unless the user named it.

    ``workers``: how many workers the job starts with, None for all slots. ``join``: never start a job.
    """

    script: str
    arguments: tuple[str, ...]
    job: str | None = None
    bamboo_config: str | None = None
    local_rank: int | None = None
    workers: int | None = None
    join: bool = False

    @property
    def script_line(self) -> list[str]:
        """Script and arguments as the launcher would have started it."""
        rank = [] if self.local_rank is None else [f"--local_rank={self.local_rank}"]
        return [self.script, *rank, *self.arguments]


def parse_command_line(arguments: Sequence[str]) -> CommandLine:
    """Everything from the first argument that is not an option of this module belongs to the script.

    Exits with a usage message when that is missing, as argparse does.
    """
    parser = argparse.ArgumentParser(
        prog="deepspeed --module deepspeed_bamboo.launch",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--job", type=filled, help="name of the job; needed to find it again (default: made from script and time)"
    )
    parser.add_argument(
        "--workers", type=int, metavar="N", help="start the job on N slots; the others stand by (default: all slots)"
    )
    parser.add_argument("--join", action="store_true", help="only join the job of that name; an error if there is none")
    parser.add_argument(
        "--bamboo_config", type=filled, metavar="FILE", help="DeepSpeed JSON, if the script's arguments name none"
    )
    parser.add_argument("--local_rank", type=int, help="set by the launcher")
    parser.add_argument("script", help="the training script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="passed to the script as they are")
    found = parser.parse_args(list(arguments))
    if found.join and found.job is None:
        parser.error("--join needs the name of the job, --job NAME")
    return CommandLine(
        script=found.script,
        arguments=tuple(found.arguments),
        job=found.job,
        bamboo_config=found.bamboo_config,
        local_rank=found.local_rank,
        workers=found.workers,
        join=found.join,
    )
