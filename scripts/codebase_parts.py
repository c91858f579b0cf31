"""What the stand-ins of ``codebase_run.py`` are made with."""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any


def made_module(name: str, **contents: Any) -> types.ModuleType:
    """A module of that name with these contents, which imports find from now on."""
    made = types.ModuleType(name)
    made.__dict__.update(contents, __path__=[], __spec__=importlib.machinery.ModuleSpec(name, None))
    sys.modules[name] = made
    return made


class Nothing:
    """What is imported from an absent package, and not used: it can be called, decorate, and be a base class."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """All arguments are taken."""

    def __call__(self, *arguments: Any, **_: Any) -> Any:
        return arguments[0] if arguments else self

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing()


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a module for whatever is imported of some packages."""

    def __init__(self, packages: tuple[str, ...]) -> None:
        self._packages = packages

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        wanted = any(name == package or name.startswith(f"{package}.") for package in self._packages)
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if wanted else None

    def create_module(self, spec: Any) -> None:
        """The usual kind."""

    def exec_module(self, module: types.ModuleType) -> None:
        def anything(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (Nothing,), {}) if name[:1].isupper() else Nothing()

        module.__dict__["__getattr__"] = anything


def absent(packages: Sequence[str]) -> None:
    """Whatever is imported of these packages is there, and does nothing."""
    for library in ("transformers.models.auto.modeling_auto", "transformers.generation.utils", "peft"):
        with contextlib.suppress(ImportError):  # these look which packages are there, and would use them
            importlib.import_module(library)
    sys.meta_path.insert(0, _Absent(tuple(packages)))
