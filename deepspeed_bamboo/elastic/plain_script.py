"""Runs a script without the plugin, and refuses a "bamboo" section that the launch module did not find.

``python -m deepspeed_bamboo.elastic.plain_script SCRIPT [ARGUMENTS]``, for commands in which there was none. A script
that finds its configuration by itself would else train without protection though that configuration asks for it.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import os
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from deepspeed_bamboo import news
from deepspeed_bamboo.config.section import BambooConfig, bamboo_section_of
from deepspeed_bamboo.elastic.settings_source import load_section
from deepspeed_bamboo.errors import ConfigError
from deepspeed_bamboo.protocol import STANDALONE

_DEEPSPEED = "deepspeed"


def main(arguments: Sequence[str]) -> None:
    """Run the script named first in ``arguments`` with the rest of them, as ``python SCRIPT ...`` does."""
    script = arguments[0]
    sys.argv = list(arguments)
    sys.path[0] = str(Path(script).resolve().parent)
    sys.meta_path.insert(0, _Watch())
    runpy.run_path(script, run_name="__main__")


class _Watch(MetaPathFinder):
    """Puts :func:`refusing` around ``deepspeed.initialize`` when the script imports DeepSpeed, and not before."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _DEEPSPEED:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            execute = loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                module.initialize = refusing(module.initialize)

            loader.exec_module = exec_module
        return spec


def refusing(stock: Callable[..., Any]) -> Callable[..., Any]:
    """``stock``, DeepSpeed's function, which raises ConfigError for a configuration with an enabled section.

    With ``other_engines: "warn"`` in the section a line says so instead.
    """

    @functools.wraps(stock)
    def initialize(*args: Any, **kwargs: Any) -> Any:
        source = _source(inspect.signature(stock).bind_partial(*args, **kwargs).arguments)
        config = None if os.environ.get(STANDALONE) else _section(source)
        if config is not None and config.enabled:
            text = _text(source)
            if config.other_engines != "warn":
                raise ConfigError(text)
            news.tell(text, who=f"rank {os.environ.get('RANK', '?')}")
        return stock(*args, **kwargs)

    return initialize


def _source(given: Mapping[str, Any]) -> Any:
    """The configuration, where stock looks for it."""
    for name in ("config", "config_params"):
        if given.get(name) is not None:
            return given[name]
    return getattr(given.get("args"), "deepspeed_config", None)


def _section(source: Any) -> BambooConfig | None:
    if isinstance(source, Mapping):
        return bamboo_section_of(source)
    return load_section(os.fspath(source)) if isinstance(source, str | os.PathLike) else None


def _text(source: Any) -> str:
    name = os.fspath(source) if isinstance(source, str | os.PathLike) else ""
    known = bool(name) and Path(name).is_file()
    file = name if known else "FILE"
    return (
        f'{name if known else "the configuration"} has an enabled "bamboo" section, but the launch module did not find '
        "it, so there are no agents, and a loss would end the job. Name the file before the script, as in --module "
        f"deepspeed_bamboo.launch --bamboo_config {file} SCRIPT, or by BAMBOO_CONFIG={file} on every machine (for a "
        'configuration made in code, a JSON file with that section); or write "enabled": false into the section'
    )


if __name__ == "__main__":
    main(sys.argv[1:])
