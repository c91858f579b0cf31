"""Habits of public scripts (``patterns.py`` of the shared cases), as they are: with a loss as DeepSpeed without one."""

from __future__ import annotations

import json
import os
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.jobs import JobResult, Jobs
from tests.runtime.test_losses import kill

SCRIPT = Path(__file__).parents[3] / "shared" / "cases" / "patterns.py"
pytestmark = pytest.mark.skipif(not SCRIPT.is_file(), reason="needs the shared cases beside the repository")

QUICK = [("ownsave", 0), ("groups-before", 2), ("objects", 3), ("data-at-the-ends", 3)]
PATTERNS = (
    "ownsave", "groups-before", "objects", "data-at-the-ends", "rate-by-hand", "own-scheduler", "late-scheduler",
    "late-optimizer", "optimizer-object", "hooks", "cast", "freeze", "adapters", "attributes", "weights-by-hand",
    "one-model", "modules", "shared-submodule", "shared-submodule unclipped",
)  # fmt: skip


def run_pattern(pattern: str, faults: list[dict[str, Any]] | None, folder: str, waits: bool = False) -> None:
    """The script as a worker runs it; ``faults`` None: with DeepSpeed alone. ``waits``: before step 4 for a joiner."""
    directory = Path(os.environ["TEST_DIRECTORY"])
    partial = directory / f"job.{os.environ['RANK']}"
    partial.write_text(os.environ["BAMBOO_JOB"], encoding="utf-8")
    partial.rename(directory / "job")
    os.environ["OWN"] = folder
    pattern, _, unclipped = pattern.partition(" ")
    os.environ["CLIP"] = "0.0" if unclipped else "1.0"
    section = {"coordinator": {"suspicion_seconds": 1.0}, "faults": faults or []}
    os.environ["SECTION"] = json.dumps(section)
    if waits:
        _wait_before_step(4)
    sys.argv = [str(SCRIPT), pattern, "4", "stock" if faults is None else "plugin"]
    runpy.run_path(str(SCRIPT), run_name="__main__")


def _wait_before_step(step: int) -> None:
    from deepspeed_bamboo.runtime.engine import BambooPipelineEngine
    from tests.runtime.scenarios import wait_for_joiners

    stock = BambooPipelineEngine.train_batch

    def train_batch(engine: Any, *args: Any, **kwargs: Any) -> Any:
        if engine.__dict__["global_steps"] == step and engine.is_reporter:
            wait_for_joiners(engine, 1)
        return stock(engine, *args, **kwargs)

    BambooPipelineEngine.train_batch = train_batch  # type: ignore[method-assign]


def said(result: JobResult) -> dict[str, str]:
    """The LOSS lines of all workers, by what they are about; each said once."""
    lines: dict[str, str] = {}
    for output in result.outputs.values():
        for line in re.findall(r"^LOSS (.*)$", output, flags=re.MULTILINE):
            key, _, value = line.partition(" ")
            assert key not in lines, f"{line!r} was said twice\n{result.transcript()}"
            lines[key] = value
    return lines


@pytest.fixture(scope="module")
def expected(jobs: Jobs, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The lines of a pattern with DeepSpeed alone, each pattern run once."""
    known: dict[str, dict[str, str]] = {}

    def lines(pattern: str) -> dict[str, str]:
        if pattern not in known:
            folder = tmp_path_factory.mktemp(f"stock-{pattern}")
            known[pattern] = said(jobs.run(run_pattern, world=4, pattern=pattern, faults=None, folder=str(folder)))
            assert len(known[pattern]) >= 8
        return known[pattern]

    return lines


def check(
    jobs: Jobs,
    expected: Any,
    pattern: str,
    stage: int | None,
    folder: Path,
    *,
    joining: bool = False,
    world: int = 4,
) -> None:
    faults = [] if stage is None else [kill(2, 0, stage, "backward", 1)]
    more: dict[str, Any] = {"joining": 1, "joining_after_deaths": 1} if joining else {}
    own = folder / "own"
    result = jobs.run(run_pattern, world=world, pattern=pattern, faults=faults, folder=str(own), waits=joining, **more)
    codes = [code for code in result.codes if code]
    assert codes == ([] if stage is None else [-9]), result.transcript()
    lines = said(result)
    digest = lines.pop("digest", None)
    assert digest is not None, result.transcript()
    assert lines == expected(pattern), result.transcript()


@pytest.mark.parametrize(("pattern", "stage"), QUICK)
def test_a_loss_changes_nothing_that_is_said(
    jobs: Jobs, expected: Any, tmp_path: Path, pattern: str, stage: int
) -> None:
    check(jobs, expected, pattern, stage, tmp_path)


@pytest.mark.sweep
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("case", ["undisturbed", "0", "2", "3", "0 joining", "2 joining", "3 joining"])
def test_every_case(jobs: Jobs, expected: Any, tmp_path: Path, pattern: str, case: str) -> None:
    stage = int(case.split()[0]) if case != "undisturbed" else None
    check(jobs, expected, pattern, stage, tmp_path, joining="joining" in case)


REFUSED_ON_TWO = {
    "late-optimizer": "there is no optimizer",
    "optimizer-object": "optimizer is an object with the parameters of all stages",
}
# Draws random numbers after its module was made, once a stage: on two workers it begins with other weights.
OTHER_WEIGHTS_ON_TWO = ("adapters",)


@pytest.mark.sweep
@pytest.mark.parametrize("pattern", PATTERNS)
def test_every_case_on_two_workers(jobs: Jobs, expected: Any, tmp_path: Path, pattern: str) -> None:
    if pattern in REFUSED_ON_TWO:
        result = jobs.run(run_pattern, world=2, pattern=pattern, faults=[], folder=str(tmp_path))
        assert result.codes == [1, 1] and not said(result), result.transcript()
        assert all(REFUSED_ON_TWO[pattern] in output for output in result.outputs.values()), result.transcript()
    elif pattern in OTHER_WEIGHTS_ON_TWO:
        undisturbed = jobs.run(run_pattern, world=2, pattern=pattern, faults=[], folder=str(tmp_path / "first"))
        lines = said(undisturbed)
        lines.pop("digest")
        check(jobs, lambda _: lines, pattern, 2, tmp_path, world=2)
    else:
        check(jobs, expected, pattern, None, tmp_path / "undisturbed", world=2)
        check(jobs, expected, pattern, 2, tmp_path / "lossy", world=2)
