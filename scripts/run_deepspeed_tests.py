"""Runs DeepSpeed's own pipeline tests with this plugin's engine in place of DeepSpeed's.

    python scripts/run_deepspeed_tests.py CHECKOUT [-k EXPRESSION ...]

CHECKOUT is a clone of DeepSpeed's repository (its folder ``tests``). Further arguments go to pytest. The tests
start their own processes, so the plugin runs standalone (see ``deepspeed_bamboo.runtime.job.standalone``). With --stock
they run with DeepSpeed's own engine, for comparison.

DeepSpeed's Adam is compiled first, which takes minutes; a TORCH_EXTENSIONS_DIR in the environment keeps the result.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

FOLDERS = ("unit/runtime/pipe", "unit/pipe")

# Loaded by pytest, and by the server that its test processes are forked from: there it replaces the engine.
PLUGIN = """
import multiprocessing
import os

import deepspeed
import torch

from deepspeed_bamboo.config.section import load_deepspeed_settings
from deepspeed_bamboo.runtime.initialize import initialize_with
from deepspeed_bamboo.runtime.stock.script_groups import ScriptGroups

multiprocessing.set_forkserver_preload([__name__])
# Takes half a minute to compile, and pipelines don't use it.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
if deepspeed.get_accelerator().device_name() == "cpu":
    # The tests save and restore a device's generator, which torch.cpu does not offer.
    torch.cpu.get_rng_state = lambda device=None: torch.get_rng_state()
    torch.cpu.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
STOCK = deepspeed.initialize
REDUNDANCY = {"redundancy": {"mode": "lazy"}}


def initialize(*args, **kwargs):
    source = kwargs.pop("config", None) or kwargs.pop("config_params", None)
    pipeline = isinstance(kwargs.get("model"), deepspeed.pipe.PipelineModule)
    if pipeline and source is not None and "STOCK_ENGINE" not in os.environ:
        source = {**load_deepspeed_settings(source), "bamboo": REDUNDANCY}
    if source is not None:
        kwargs["config"] = source
    result = initialize_with(STOCK, ScriptGroups(), *args, **kwargs)
    print("engine:", type(result[0]).__name__)
    return result


deepspeed.initialize = initialize
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tests named by ``argv`` (default: the process's arguments). Returns pytest's exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="folder of a clone of DeepSpeed's repository")
    parser.add_argument("--stock", action="store_true", help="leave DeepSpeed's own engine in place")
    arguments, further = parser.parse_known_args(argv)
    tests = arguments.checkout.resolve() / "tests"
    missing = [folder for folder in FOLDERS if not (tests / folder).is_dir()]
    if missing:
        parser.error(f"{tests} has no {', '.join(missing)}; name a clone of DeepSpeed's repository")
    with tempfile.TemporaryDirectory(prefix="bamboo-tests-") as folder:
        Path(folder, "bamboo_in_place.py").write_text(PLUGIN, encoding="utf-8")
        repository = Path(__file__).resolve().parent.parent
        paths = [folder, str(repository), str(tests), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
            "BAMBOO_STANDALONE": "1",
            # On a machine without accelerators DeepSpeed's tests count this many.
            "LOCAL_SIZE": os.environ.get("LOCAL_SIZE", "8"),
            # A compile that was killed leaves a lock in the usual folder, for which every later run waits for ever.
            "TORCH_EXTENSIONS_DIR": os.environ.get("TORCH_EXTENSIONS_DIR", f"{folder}/extensions"),
        }
        if arguments.stock:
            environment["STOCK_ENGINE"] = "1"
        command = [sys.executable, "-m", "pytest", "-p", "bamboo_in_place", "-p", "no:cacheprovider"]
        command += [*FOLDERS, *further]
        return subprocess.run(command, cwd=tests, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
