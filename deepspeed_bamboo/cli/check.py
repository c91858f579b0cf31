"""``ds_bamboo check``: reads a DeepSpeed configuration as training would, and reports what it finds."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from deepspeed_bamboo.cloud.scripted import load_script
from deepspeed_bamboo.config.requirements import settings_problems
from deepspeed_bamboo.config.section import SECTION, BambooConfig
from deepspeed_bamboo.coordination.guard import EtcdGuard
from deepspeed_bamboo.elastic.settings_source import hjson_value, load_section
from deepspeed_bamboo.errors import ConfigError
from deepspeed_bamboo.eventlog.log import check_directory
from deepspeed_bamboo.faults import FaultScript


def add_parser(subparsers: Any) -> None:
    """Register ``check`` with the subparsers of ``ds_bamboo``."""
    parser = subparsers.add_parser(
        "check",
        help='check the "bamboo" section of a DeepSpeed configuration',
        description='Prints the "bamboo" section with all defaults filled in. If it is wrong, prints every problem, '
        "and the exit code is 1.",
    )
    parser.add_argument("configuration", help="DeepSpeed JSON file")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Check the file named in ``arguments``, and the files that it names. Raises ConfigError."""
    # Not load_bamboo_section: that imports deepspeed, which takes seconds and prints warnings.
    config = load_section(arguments.configuration)
    if config is None and _is_of_a_fleet(hjson_value(arguments.configuration)):
        print(
            f"{arguments.configuration} describes a fleet, and is no DeepSpeed configuration; `ds_bamboo fleet up FILE "
            "--dry-run` checks it, and `ds_bamboo fleet --help` has more"
        )
        return 1
    if config is None:
        print(
            f'{arguments.configuration} has no "{SECTION}" section: this is plain DeepSpeed; '
            f'"{SECTION}": {{}} turns the plugin on'
        )
        return 0
    settings = hjson_value(arguments.configuration)
    problems = [ConfigError(problem) for problem in settings_problems(settings)] if config.enabled else []
    problems += _problems(config)
    if problems:
        raise problems[0] if len(problems) == 1 else ConfigError(*map(str, problems), where=arguments.configuration)
    print(config.model_dump_json(indent=2))
    if config.redundancy.mode == "auto":
        print('redundancy.mode "auto" starts with lazy, and the log, an event and status say what it chooses')
    variable = config.coordinator.password_env
    if variable is not None and not os.environ.get(variable):
        print(f"coordinator.password_env: {variable} is not set here; set it where the job is started")
    if not config.enabled:
        print('"enabled" is false: this is plain DeepSpeed')
    return 0


def _is_of_a_fleet(settings: object) -> bool:
    return isinstance(settings, dict) and {"instance_types", "command"} <= settings.keys()


def _problems(config: BambooConfig) -> Iterator[ConfigError]:
    """Further problems that the job would fail on: files that the section names, directories without write access."""
    script, checkpoints = config.notices.script, config.checkpoint.dir
    folders = [("event_log", config.event_log)]
    if checkpoints is not None and not checkpoints.startswith("s3://"):
        folders.append(("checkpoint.dir", checkpoints))
    steps: list[Callable[[], object]] = [
        EtcdGuard.of(config.coordinator).files,
        *([partial(load_script, script, where="notices.script")] if isinstance(script, str) else []),
        *(partial(check_directory, folder, setting=setting) for setting, folder in folders if folder is not None),
        partial(FaultScript.of_job, config.faults, environment={}),
    ]
    for step in steps:
        try:
            step()
        except ConfigError as error:
            yield error
