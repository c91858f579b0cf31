"""Runs a script as ``python SCRIPT ARGUMENTS...`` would, in a fork of a process that has imported what it needs."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path


def run(script: str, arguments: list[str], environment: dict[str, str]) -> None:
    """In the forked process: be the script."""
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")
