"""``ds_bamboo``: the root of the console command. Each subcommand registers itself with ``add_parser``."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import io
import sys
from collections.abc import Sequence

from deepspeed_bamboo.errors import BambooError

# Each module has add_parser(subparsers), which sets `run`: arguments -> exit code.
COMMAND_MODULES = (
    "deepspeed_bamboo.cli.check",
    "deepspeed_bamboo.cli.compare",
    "deepspeed_bamboo.cli.doctor",
    "deepspeed_bamboo.cli.fleet",
    "deepspeed_bamboo.cli.job",
    "deepspeed_bamboo.cli.plan",
    "deepspeed_bamboo.cli.profile",
    "deepspeed_bamboo.cli.run",
    "deepspeed_bamboo.cli.schedule",
    "deepspeed_bamboo.sim.cli",
    "deepspeed_bamboo.sim.advise_cli",
)

_EXIT_INTERRUPTED = 130  # as shells have it for Ctrl-C


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in ``argv`` (default: the process's own arguments). Returns the exit code."""
    arguments = build_parser().parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        with contextlib.suppress(OSError):  # some pipes take no other way once they are open
            sys.stdout.reconfigure(errors="backslashreplace")  # a name that the terminal can't show is no reason to end
    try:
        code = int(arguments.run(arguments))
        if sys.stdout is not None:
            sys.stdout.flush()  # now, since what fails at exit can't be told any more
        return code
    except BambooError as error:
        print(f"ds_bamboo: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # The reader, `head` for instance, has seen enough; nothing more may be written, not even at exit.
        sys.stdout = None  # type: ignore[assignment]
        return 0
    except OSError as error:
        sys.stdout = None  # type: ignore[assignment]  # where it is full, the rest of it would fail at exit
        print(f"ds_bamboo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return _EXIT_INTERRUPTED


def build_parser(modules: Sequence[str] = COMMAND_MODULES) -> argparse.ArgumentParser:
    """The parser with the subcommands of all ``modules`` that this installation has."""
    parser = argparse.ArgumentParser(prog="ds_bamboo", description="DeepSpeed pipelines on spot machines.")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for name in modules:
        if importlib.util.find_spec(name) is not None:
            importlib.import_module(name).add_parser(subparsers)
    return parser


if __name__ == "__main__":
    sys.exit(main())
