"""``ds_bamboo doctor``: looks at this machine and at a configuration before a job is started."""

from __future__ import annotations

import argparse
import itertools
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from deepspeed_bamboo.config.section import SECTION, BambooConfig, bamboo_section_of, read_bamboo_section
from deepspeed_bamboo.doctor.examination import examine
from deepspeed_bamboo.doctor.finding import Finding, warning
from deepspeed_bamboo.doctor.machine import ThisMachine
from deepspeed_bamboo.doctor.subject import ModelFacts, Subject, read_hosts
from deepspeed_bamboo.elastic.settings_source import settings_in
from deepspeed_bamboo.errors import ConfigError
from deepspeed_bamboo.options import file_path, filled, path_text

_MOST_STAGES = 10_000


def add_parser(subparsers: Any) -> None:
    """Register ``doctor`` with the subparsers of ``ds_bamboo``."""
    parser = subparsers.add_parser(
        "doctor",
        help="look for what would go wrong, before a job is started",
        description="Looks at this machine (versions, GPUs, ports, shared memory, clock), at what a configuration "
        "names (etcd, bucket, paths) and at how it fits the hosts, and prints what is wrong and what to do. Prints "
        "nothing when all is well. Run it on each machine. The exit code is 1 if something stops the job from running.",
    )
    parser.add_argument(
        "--config", type=path_text, metavar="FILE", help="DeepSpeed JSON (default: the settings' defaults)"
    )
    parser.add_argument(
        "--hostfile", type=file_path, metavar="FILE", help="DeepSpeed's host file (default: this machine)"
    )
    parser.add_argument("--stages", type=int, metavar="P", help="pipeline stages (default: as many as workers)")
    parser.add_argument(
        "--model", type=filled, metavar="NAME", help="a model of scripts/train.py, for layers and device memory"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON list")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print what is found. Returns 1 when something blocks, else 0. Raises ConfigError for files it can't read."""
    subject = subject_of(arguments)
    findings = [*_of_section(subject.settings), *_plain(arguments, subject), *examine(subject)]
    if arguments.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        for finding in sorted(findings, key=lambda finding: not finding.blocker):
            print(finding)
    return int(any(finding.blocker for finding in findings))


def _of_section(settings: Mapping[str, Any]) -> Iterator[Finding]:
    """What is wrong with the section itself; the checks take the defaults of wrong parts."""
    for problem in _section_in(settings)[1]:
        what, _, remedy = problem.rpartition("; ")
        yield Finding(what or problem, remedy if what else "correct it")


def _section_in(settings: Mapping[str, Any]) -> tuple[BambooConfig, tuple[str, ...]]:
    """The section and its problems. Raises ConfigError where it is no object, or its name is misspelled."""
    if SECTION not in settings:
        return bamboo_section_of(settings) or BambooConfig(), ()
    return read_bamboo_section(settings[SECTION])


def _plain(arguments: argparse.Namespace, subject: Subject) -> Iterator[Finding]:
    """Where the file that is named does not turn the plugin on."""
    if arguments.config is None:
        return
    if SECTION not in subject.settings:
        yield warning(
            f'{arguments.config} has no "{SECTION}" section: this is plain DeepSpeed',
            f'"{SECTION}": {{}} turns the plugin on',
        )
    elif not subject.section.enabled:
        yield warning(
            f'{arguments.config} has "enabled": false: this is plain DeepSpeed', '"enabled": true turns the plugin on'
        )


def subject_of(arguments: argparse.Namespace) -> Subject:
    """What the command line names. Raises ConfigError."""
    if arguments.stages is not None and not 1 <= arguments.stages <= _MOST_STAGES:
        raise ConfigError(f"--stages is {arguments.stages}; give a number from 1 to {_MOST_STAGES}")
    settings = {} if arguments.config is None else settings_in(arguments.config)
    subject = Subject(
        machine=ThisMachine(),
        environment=dict(os.environ),
        settings=settings,
        section=_section_in(settings)[0],
        hosts=() if arguments.hostfile is None else read_hosts(arguments.hostfile),
        stages=arguments.stages,
    )
    if arguments.model is None:
        return subject
    stages = arguments.stages or subject.workers or 1
    return Subject(**{**vars(subject), "stages": stages, "model": model_facts(arguments.model, stages)})


def model_facts(name: str, stages: int) -> ModelFacts | None:
    """None without torch or deepspeed, which the checks then tell of."""
    # Only where it is asked for: this imports torch and deepspeed, which takes seconds and prints warnings.
    try:
        from deepspeed_bamboo.models.catalog import model_named
        from deepspeed_bamboo.models.costs import activations_with_loss, layer_costs, layer_parameters
        from deepspeed_bamboo.models.partition import balanced_parts
    except ImportError:
        return None
    try:
        model = model_named(name)
    except ValueError as error:
        raise ConfigError(f"--model: {error}") from error
    layers = model.layers()
    counts = layer_parameters(layers)
    parts = balanced_parts(layer_costs(layers, model.sample), min(stages, len(layers)))
    held, kept = (
        tuple(sum(numbers[start:stop]) for start, stop in itertools.pairwise(parts))
        for numbers in (counts, activations_with_loss(layers, model.sample))
    )
    return ModelFacts(name, layers=len(layers), stage_parameters=held, stage_activations=kept)
