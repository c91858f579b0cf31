"""Stands in for the runtime's entry point: runs the script named after ``--`` without importing deepspeed."""

from __future__ import annotations

import runpy
import sys

if __name__ == "__main__":
    assert sys.argv[1] == "--"
    del sys.argv[:2]
    runpy.run_path(sys.argv[0], run_name="__main__")
