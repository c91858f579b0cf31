"""Whether the engine is at work, or its script is between two calls: they see the modules in different ways."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

from deepspeed_bamboo.errors import ConfigError
from deepspeed_bamboo.runtime.stock.hosted_view import in_thread_of_script

_MAIN_THREAD_ONLY = frozenset({"train_batch", "eval_batch"})

Method = TypeVar("Method", bound=Callable[..., Any])


class Engine(Protocol):
    """As it is known here. ``refused``: what a call in another thread was refused for; ``used``: one was not."""

    refused: ConfigError | None
    used: bool

    def working(self) -> AbstractContextManager[None]:
        """Inside, the engine is at work."""


def at_work(method: Method) -> Method:
    """``method`` of the engine, in which DeepSpeed and the plugin use the modules, each one stage at a time."""

    @functools.wraps(method)
    def call(engine: Engine, *args: Any, **kwargs: Any) -> Any:
        if method.__name__ in _MAIN_THREAD_ONLY:
            if in_thread_of_script():
                error = ConfigError(
                    f"{method.__name__} was called in the thread {threading.current_thread().name!r}, and the plugin "
                    "knows the main thread only as the one that trains: call initialize and it there"
                )
                engine.refused = None if engine.used else error
                raise error
            engine.refused, engine.used = None, True
        with engine.working():
            return method(engine, *args, **kwargs)

    return call  # type: ignore[return-value]
