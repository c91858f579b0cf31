"""Imports a file of scripts/, which is no package."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

SCRIPTS = Path(__file__).parent.parent.parent / "scripts"


def load_script(name: str) -> ModuleType:
    """The module of ``scripts/<name>.py``."""
    spec = importlib.util.spec_from_file_location(f"script_{name}", SCRIPTS / f"{name}.py")
    if spec is None or spec.loader is None:
        raise ImportError(f"there is no scripts/{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
