"""Finding the "bamboo" section before the script runs: in the DeepSpeed JSON that the command line names."""

from __future__ import annotations

import ast
import base64
import errno
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import hjson  # type: ignore[import-untyped]

from deepspeed_bamboo.config.section import SECTION, BambooConfig, bamboo_section_of, parse_bamboo_section
from deepspeed_bamboo.elastic.command_line import CommandLine
from deepspeed_bamboo.errors import ConfigError
from deepspeed_bamboo.protocol import CONFIG

_OPTIONS = ("--deepspeed_config", "--deepspeed-config", "--ds_config", "--ds-config", "--deepspeed")


def find_source(*, bamboo_config: str | None, arguments: Sequence[str]) -> str | None:
    """The configuration that the launch option or the script's own ``arguments`` name; None when neither does.

    Of several the last counts, as it does in the script's own parser.
    """
    if bamboo_config is not None:
        return bamboo_config
    found = None
    for position, argument in enumerate(arguments):
        option, has_value, value = argument.partition("=")
        if option not in _OPTIONS:
            continue
        following = arguments[position + 1] if position + 1 < len(arguments) else ""
        if has_value:
            found = value
        elif following and not following.startswith("-"):
            found = following
    return found


def find_section(line: CommandLine, environment: Mapping[str, str]) -> tuple[BambooConfig | None, str | None]:
    """The section for a command, and what was named as its configuration; None: there is none.

    Without a section in what the command names, or in the script itself, that of BAMBOO_CONFIG's file counts.
    """
    source = find_source(bamboo_config=line.bamboo_config, arguments=line.arguments)
    found = section_in_script(line.script) if source is None else load_section(source)
    named = environment.get(CONFIG)
    return (load_section(named), named) if found is None and named else (found, source)


def load_section(source: str) -> BambooConfig | None:
    """The section in ``source``, a path or base64 as DeepSpeed takes it; None when there is none.

    Reads as leniently as DeepSpeed does, without importing it, which takes seconds. Raises ConfigError
    for a file that isn't there, can't be read or parsed, and for a wrong section.
    """
    return bamboo_section_of(settings_in(source))


def settings_in(source: str) -> dict[str, Any]:
    """The whole DeepSpeed configuration in ``source``. Raises ConfigError as :func:`load_section` does."""
    settings = hjson_value(source)
    if not isinstance(settings, dict):
        raise ConfigError(f"{_shown(source)} holds no JSON object; a DeepSpeed configuration is {{...}}")
    return settings


def section_in_script(script: str) -> BambooConfig | None:
    """The section that ``script`` puts into a dict by itself, for a command that names no configuration; None if none.

    Found are ``"bamboo": ...`` in a dict and ``config["bamboo"] = ...``, in this file and not in those that it imports.
    A section that is written out is read, for agents act on some of it; of one that is computed the defaults are taken.
    Raises ConfigError for a wrong section.
    """
    try:
        tree = ast.parse(Path(script).read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, SyntaxError):
        return None  # whoever runs it will say what is wrong
    for node in ast.walk(tree):
        for value in _values_of_section(node):
            try:
                literal = ast.literal_eval(value)
            except ValueError:
                return BambooConfig()
            return parse_bamboo_section(literal)
    return None


def _values_of_section(node: ast.AST) -> Iterator[ast.expr]:
    if isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        yield from (value for key, value in pairs if isinstance(key, ast.Constant) and key.value == SECTION)
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            index = target.slice if isinstance(target, ast.Subscript) else None
            if isinstance(index, ast.Constant) and index.value == SECTION:
                yield node.value


def hjson_value(source: str) -> Any:
    """What the text in ``source`` says, whatever kind of value it is. Raises ConfigError."""
    try:
        text = Path(source).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOENT, errno.ENAMETOOLONG):
            return _decoded(source, error)
        raise ConfigError(f"{_shown(source)} can't be read ({error}); give a JSON file") from error
    try:
        value = hjson.loads(text, object_pairs_hook=_without_duplicates)
        _check_characters(value)
    except OverflowError as error:  # hjson wants to make 1e400 a whole number
        raise ConfigError(
            f"{_shown(source)} has a number that is too large for a computer's (1.8e308); correct it"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{_shown(source)} is no valid DeepSpeed JSON: {error}") from error
    return value


def _decoded(source: str, missing: OSError) -> Any:
    try:
        value = hjson.loads(base64.urlsafe_b64decode(source).decode("utf-8"), object_pairs_hook=_without_duplicates)
        _check_characters(value)
    except (ValueError, RecursionError, OverflowError):
        home = ", with the whole path in place of ~, which shells don't replace behind = or in quotes"
        raise ConfigError(
            f"DeepSpeed configuration {_shown(source)} does not exist; check the path, seen from {Path.cwd()}"
            f"{home if source.startswith('~') else ''}"
        ) from missing
    return value


def _check_characters(value: Any) -> None:
    """Raise ValueError for half a character (``"\\ud800"``), which nothing can print or look up."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start : error.end]
        raise ValueError(f"it has {half.encode('unicode_escape').decode()}, which is half of a character") from None


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    settings = dict(pairs)
    if len(settings) != len(pairs):
        doubled = sorted(key for key, times in Counter(key for key, _ in pairs).items() if times > 1)
        raise ValueError(f"duplicate keys {', '.join(doubled)}")
    return settings


def _shown(source: str) -> str:
    return repr(source if len(source) <= 200 else f"{source[:200]}...")
