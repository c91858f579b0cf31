"""Finding the "bamboo" section before the script runs: in the DeepSpeed JSON that the command line names."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hjson  # type: ignore[import-untyped]

from deepspeed_bamboo.config import BambooConfig, load_bamboo_section

_OPTIONS = ("--deepspeed_config", "--deepspeed-config", "--ds_config", "--ds-config", "--deepspeed")


def find_source(*, bamboo_config: str | None, arguments: Sequence[str]) -> str | None:
    """The configuration that the launch option or the script's own ``arguments`` name; None when neither does."""
    if bamboo_config is not None:
        return bamboo_config
    for position, argument in enumerate(arguments):
        option, has_value, value = argument.partition("=")
        if option not in _OPTIONS:
            continue
        if has_value:
            return value
        following = arguments[position + 1] if position + 1 < len(arguments) else ""
        if following and not following.startswith("-"):
            return following
    return None


def load_section(source: str) -> BambooConfig | None:
    """The section in ``source``, a path or base64 as DeepSpeed takes it; None when there is none.

    Reads as leniently as DeepSpeed does, without importing it, which takes seconds. What cannot be read
    this way is left to ``load_bamboo_section`` to explain. Raises ConfigError.
    """
    settings = _read(source)
    return load_bamboo_section(source if settings is None else settings)


def _read(source: str) -> dict[str, Any] | None:
    try:
        path = Path(source)
        text = path.read_text(encoding="utf-8") if path.exists() else base64.urlsafe_b64decode(source).decode()
        settings = hjson.loads(text, object_pairs_hook=_without_duplicates)
    except (OSError, ValueError, binascii.Error):
        return None
    return settings if isinstance(settings, dict) else None


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    settings = dict(pairs)
    if len(settings) != len(pairs):
        raise ValueError("duplicate keys")
    return settings
