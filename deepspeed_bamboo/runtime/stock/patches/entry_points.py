"""DeepSpeed's entry points, replaced so that an unmodified script gets the plugin's engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed


@contextmanager
def engine_class(make: Callable[..., Any]) -> Iterator[None]:
    """Inside the block ``deepspeed.initialize`` calls ``make`` where it would make a PipelineEngine."""
    stock = deepspeed.PipelineEngine
    deepspeed.PipelineEngine = make
    try:
        yield
    finally:
        deepspeed.PipelineEngine = stock


@contextmanager
def initialize_function(initialize: Callable[..., Any]) -> Iterator[None]:
    """Inside the block a script's ``deepspeed.initialize`` is ``initialize``."""
    stock = deepspeed.initialize
    deepspeed.initialize = initialize
    try:
        yield
    finally:
        deepspeed.initialize = stock
