"""``ds_bamboo check``: reads a DeepSpeed configuration as training would, and reports what it finds."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from deepspeed_bamboo.cloud.scripted import load_script
from deepspeed_bamboo.config.requirements import settings_problems
from deepspeed_bamboo.config.section import (
    SECTION,
    BambooConfig,
    bamboo_section_of,
    read_bamboo_section,
)
from deepspeed_bamboo.coordination.guard import EtcdGuard
from deepspeed_bamboo.elastic.settings_source import settings_in
from deepspeed_bamboo.errors import ConfigError
from deepspeed_bamboo.eventlog.log import check_directory
from deepspeed_bamboo.faults import FaultScript
from deepspeed_bamboo.options import path_text


def add_parser(subparsers: Any) -> None:
    """Register ``check`` with the subparsers of ``ds_bamboo``."""
    parser = subparsers.add_parser(
        "check",
        help='check the "bamboo" section of a DeepSpeed configuration',
        description='Prints the "bamboo" section with all defaults filled in. If it is wrong, prints every problem, '
        "and the exit code is 1.",
    )
    parser.add_argument("configuration", type=path_text, help="DeepSpeed JSON file")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Check the file named in ``arguments``, and the files that it names. Raises ConfigError."""
    # Not load_deepspeed_settings: that imports deepspeed, which takes seconds and prints warnings.
    settings = settings_in(arguments.configuration)
    if SECTION not in settings:
        return _without_section(arguments.configuration, settings)
    config, problems = every_problem(settings)
    if problems:
        raise ConfigError(*problems, where=arguments.configuration)
    print(config.model_dump_json(indent=2))
    if config.redundancy.mode == "auto":
        print('redundancy.mode "auto" starts with lazy, and the log, an event and status say what it chooses')
    variable = config.coordinator.password_env
    if variable is not None and not os.environ.get(variable):
        print(f"coordinator.password_env: {variable} is not set here; set it where the job is started")
    if not config.enabled:
        print('"enabled" is false: this is plain DeepSpeed')
    return 0


def every_problem(settings: Mapping[str, Any]) -> tuple[BambooConfig, tuple[str, ...]]:
    """The section of a configuration that has one, and all that is wrong with both, of whatever kind."""
    config, wrong = read_bamboo_section(settings[SECTION])
    further = settings_problems(settings) if config.enabled else ()
    return config, (*wrong, *further, *map(str, _problems(config)))


def _without_section(configuration: str, settings: Mapping[str, Any]) -> int:
    """Say what a configuration without the section is. Returns the exit code; ConfigError: its name is misspelled."""
    bamboo_section_of(settings)
    if _is_of_a_fleet(settings):
        print(
            f"{configuration} describes a fleet, and is no DeepSpeed configuration; `ds_bamboo fleet up FILE "
            "--dry-run` checks it, and `ds_bamboo fleet --help` has more"
        )
        return 1
    print(f'{configuration} has no "{SECTION}" section: this is plain DeepSpeed; "{SECTION}": {{}} turns the plugin on')
    return 0


def _is_of_a_fleet(settings: Mapping[str, Any]) -> bool:
    return {"instance_types", "command"} <= settings.keys()


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
