"""Reads checkpoint files: errors name the file, and wherever possible no code from the file runs.

DeepSpeed reads every file through its engine's ``checkpoint_engine``; inside these blocks that is one of ours. A file
that the plugin has written itself holds tensors, plain values and a few classes of DeepSpeed, so torch reads it with
``weights_only``. A script's own checkpoint may hold any object in ``client_state``, and is unpickled as stock does it.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from deepspeed_bamboo.errors import CheckpointError, ShadowError

Load = Callable[..., Any]

# What reading a file that is damaged, or of something else, can raise: in torch, in DeepSpeed, in what the file has.
UNREADABLE = (
    *(CheckpointError, ShadowError, pickle.UnpicklingError, zipfile.BadZipFile),
    *(AssertionError, AttributeError, EOFError, LookupError, OSError, RuntimeError, TypeError, ValueError),
)

# What DeepSpeed's own files hold beyond what torch allows anyway.
_ALLOWED: list[Any] = [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address, set]
# What numpy's numbers and arrays of numbers are made by, as np.interp or a schedule of cosines puts them into groups.
_ALLOWED += [np.float64(0).__reduce__()[0], np.zeros(0).__reduce__()[0], np.ndarray, np.dtype]
_ALLOWED += sorted({type(np.dtype(code)) for code in "?bhilqBHILQefdFD"}, key=str)


class ReadingEngine(Protocol):
    """Whose files are read: an engine."""

    checkpoint_engine: Any


class ReadFiles:
    """In the place of ``checkpoint_engine``: reads by ``load``; everything else is that engine's."""

    def __init__(self, engine: Any, load: Load) -> None:
        self._engine = engine
        self._load = load

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def load(self, path: str, map_location: Any = None) -> Any:
        """What is in the file ``path``. Raises CheckpointError that names it."""
        try:
            return self._load(path, map_location=map_location)
        except (OSError, EOFError, RuntimeError, ValueError, LookupError, zipfile.BadZipFile) as error:
            raise CheckpointError(
                f"{path} can't be read as a checkpoint file ({type(error).__name__}: {error}); it is truncated, "
                "damaged or not there"
            ) from error


@contextmanager
def no_code_from_files(engine: ReadingEngine) -> Iterator[None]:
    """Inside, what ``engine`` loads is read with ``weights_only``. Raises CheckpointError for other objects."""

    def load(path: str, map_location: Any = None) -> Any:
        try:
            with torch.serialization.safe_globals(_ALLOWED):
                return torch.load(path, map_location=map_location, weights_only=True)
        except pickle.UnpicklingError as error:
            raise CheckpointError(
                f"{path} holds what only code can rebuild, so it is not read ({error}). If it is a class of yours (in "
                "the state of a scheduler or an optimizer), call torch.serialization.add_safe_globals([THE_CLASS]) "
                "before deepspeed.initialize"
            ) from error

    with _reading(engine, load):
        yield


@contextmanager
def files_named_in_errors(engine: ReadingEngine) -> Iterator[None]:
    """Inside, files are read as stock does it, and an error names the file."""
    stock: Load = engine.checkpoint_engine.load

    def load(path: str, map_location: Any = None) -> Any:
        try:
            return stock(path, map_location=map_location)
        except pickle.UnpicklingError as error:
            raise ValueError(str(error)) from error

    with _reading(engine, load):
        yield


@contextmanager
def _reading(engine: ReadingEngine, load: Load) -> Iterator[None]:
    before = engine.checkpoint_engine
    if isinstance(before, ReadFiles):  # the outer block decides
        yield
        return
    engine.checkpoint_engine = ReadFiles(before, load)
    try:
        yield
    finally:
        engine.checkpoint_engine = before
