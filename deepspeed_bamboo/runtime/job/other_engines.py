"""Engines that a script makes past the plugin: nothing of them survives a loss, though the launch module was used."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from deepspeed.runtime.engine import DeepSpeedEngine

from deepspeed_bamboo import news
from deepspeed_bamboo.errors import ConfigError
from deepspeed_bamboo.protocol import OTHER_ENGINES


@contextmanager
def watched(is_known: Callable[[Any], bool]) -> Iterator[None]:
    """Inside, an engine that is not ``is_known`` is refused, or warned of, as the agent says; without an agent neither.

    Refused with ConfigError, before stock builds anything.
    """
    stock = DeepSpeedEngine.__init__

    @functools.wraps(stock)
    def construct(engine: Any, *args: Any, **kwargs: Any) -> None:
        wanted = os.environ.get(OTHER_ENGINES)
        if wanted and not is_known(engine):
            text = _text(type(engine))
            if wanted != "warn":
                raise ConfigError(text)
            news.tell(text, who=f"rank {os.environ.get('RANK', '?')}")
        stock(engine, *args, **kwargs)

    DeepSpeedEngine.__init__ = construct
    try:
        yield
    finally:
        DeepSpeedEngine.__init__ = stock


def _text(made: type) -> str:
    return (
        f"this script makes a {made.__module__}.{made.__qualname__}, which is not the plugin's engine, so a loss would "
        'end the job, though the launcher found an enabled "bamboo" section. Call deepspeed.initialize with a '
        'PipelineModule and with that section in its configuration ("bamboo": {} in a dict made in code; BAMBOO_CONFIG '
        "can name a file that has it, for a codebase that makes its configuration by itself), and let it make the "
        'engine; or set bamboo.other_engines to "warn" for an engine that need not be protected'
    )
