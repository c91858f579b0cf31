"""What the stand-ins of ``codebase_run.py`` are made with."""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import re
import sys
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
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


def changes_by_file(changes: Iterable[tuple[str, str, str]]) -> dict[str, list[tuple[str, str]]]:
    """By file the patterns, and what takes their places."""
    found: dict[str, list[tuple[str, str]]] = {}
    for file, pattern, replacement in changes:
        found.setdefault(file, []).append((pattern, replacement))
    return found


def changed_text(source: bytes, changes: Sequence[tuple[str, str]], *, path: str) -> str:
    """A file's text with each pattern replaced, which must be there once."""
    text = source.decode("utf-8")
    for pattern, replacement in changes:
        text, count = re.subn(pattern, replacement, text)
        if count != 1:
            raise SystemExit(f"{path}: {count} places are like {pattern!r}, and one has to be changed")
    return text


class _ChangedLoader(importlib.machinery.SourceFileLoader):
    """Loads a module with lines changed; its file stays as it is."""

    changes: Sequence[tuple[str, str]] = ()

    def get_code(self, fullname: str) -> types.CodeType:
        """Never what was compiled before, which is of the file as it is."""
        source = changed_text(self.get_data(self.path), self.changes, path=self.path)
        return compile(source, self.path, "exec", dont_inherit=True)


class _Changed(importlib.abc.MetaPathFinder):
    def __init__(self, changes: Mapping[Path, Sequence[tuple[str, str]]]) -> None:
        self._changes = changes

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if not any(file.stem == name.rpartition(".")[2] for file in self._changes):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        its = self._changes.get(Path(spec.origin)) if spec is not None and spec.origin else None
        if spec is None or its is None:
            return None
        spec.loader = _ChangedLoader(name, str(spec.origin))
        spec.loader.changes = its
        return spec


def import_changed(changes: Mapping[Path, Sequence[tuple[str, str]]]) -> None:
    """Modules of these files are loaded with these changes from now on."""
    if changes:
        sys.meta_path.insert(0, _Changed(changes))
