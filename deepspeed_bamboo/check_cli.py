"""``ds_bamboo check``: reads a DeepSpeed configuration as training would, and says what it finds."""

from __future__ import annotations

import argparse
from typing import Any

from deepspeed_bamboo.cloud.scripted import load_script
from deepspeed_bamboo.config import SECTION
from deepspeed_bamboo.elastic.settings_source import load_section
from deepspeed_bamboo.faults import FaultScript


def add_parser(subparsers: Any) -> None:
    """Register ``check`` with the subparsers of ``ds_bamboo``."""
    parser = subparsers.add_parser(
        "check",
        help='check the "bamboo" section of a DeepSpeed configuration',
        description='Prints the "bamboo" section with all defaults filled in; exit code 1 and every problem when it '
        "is wrong.",
    )
    parser.add_argument("configuration", help="DeepSpeed JSON file")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Check the file named in ``arguments``, and the files that it names. Raises ConfigError."""
    # Not load_bamboo_section: that imports deepspeed, which takes seconds and prints warnings.
    config = load_section(arguments.configuration)
    if config is None:
        print(
            f'{arguments.configuration} has no "{SECTION}" section: this is plain DeepSpeed; '
            f'"{SECTION}": {{}} turns the plugin on'
        )
        return 0
    # What training would read besides, so that it is found wrong here and not at the start of the job.
    FaultScript.of_job(config.faults, environment={})
    if isinstance(config.notices.script, str):
        load_script(config.notices.script, where="notices.script")
    print(config.model_dump_json(indent=2))
    if config.redundancy.mode == "auto":
        print('redundancy.mode "auto" begins lazy and says what it chooses and why: in the log, in an event, in status')
    if not config.enabled:
        print('"enabled" is false: this is plain DeepSpeed')
    return 0
