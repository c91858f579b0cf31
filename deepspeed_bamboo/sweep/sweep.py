"""Runs the cases of a sweep, each next to the undisturbed run of its setup."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from deepspeed_bamboo.config.section import load_deepspeed_settings
from deepspeed_bamboo.errors import BambooError, EventLogError
from deepspeed_bamboo.eventlog.files import merge_event_files, read_events
from deepspeed_bamboo.eventlog.summary import RunSummary, summarize
from deepspeed_bamboo.sweep.cases import Case
from deepspeed_bamboo.sweep.job import JobResult, run_job
from deepspeed_bamboo.sweep.rows import Row, judge
from deepspeed_bamboo.sweep.setups import Setup

RunJob = Callable[..., JobResult]


class SweepError(BambooError):
    """An undisturbed run failed, so there is nothing to compare with."""


class Sweep:
    """One sweep. ``root``: the repository. ``folder``: gets what the jobs leave; equal ones are removed again."""

    def __init__(self, *, root: Path, folder: Path, job: RunJob = run_job) -> None:
        self._script = root / "scripts" / "train.py"
        self._base = load_deepspeed_settings(root / "configs" / "cpu-demo.json")
        self._folder = folder
        self._run_job = job
        self._guard = threading.Lock()
        self._locks: dict[Setup, threading.Lock] = {}
        self._references: dict[Setup, RunSummary] = {}

    def rows(self, cases: Sequence[Case], *, jobs: int = 1) -> Iterator[Row]:
        """The row of each case, in their order, ``jobs`` at a time. Where the undisturbed run fails, that is wrong."""

        def one(case: Case) -> Row:
            try:
                return self.row(case, reference=self.reference_once(case.setup))
            except SweepError as error:
                return Row(case.name, 0.0, (str(error),))

        with ThreadPoolExecutor(jobs) as pool:
            yield from pool.map(one, cases)

    def reference_once(self, setup: Setup) -> RunSummary:
        """The summary of the undisturbed run of the whole setup; run when it is first asked for."""
        setup = setup.whole
        with self._guard:
            lock = self._locks.setdefault(setup, threading.Lock())
        with lock:
            if setup not in self._references:
                self._references[setup] = self.reference(setup)
            return self._references[setup]

    def reference(self, setup: Setup) -> RunSummary:
        """The summary of the undisturbed run of ``setup``. Raises SweepError when it fails."""
        folder = self._folder / setup.name / "undisturbed"
        result = self._run(Case(setup), folder)
        try:
            summary = summarize(read_events(merge_event_files(folder / "events")))
        except EventLogError as error:
            raise SweepError(f"undisturbed run of {setup.name}: {error}; see {result.output}") from error
        if result.exit_code or summary.digest is None:
            raise SweepError(f"undisturbed run of {setup.name} ended with {result.exit_code}; see {result.output}")
        return summary

    def row(self, case: Case, *, reference: RunSummary) -> Row:
        """Run one case and judge it against ``reference``."""
        folder = self._folder_of(case)
        result = self._run(case, folder)
        run, fired, problem = None, 0, None
        try:
            events = read_events(merge_event_files(folder / "events"))
            run, fired = summarize(events), sum(event["event"] == "fault" for event in events)
        except EventLogError as error:
            problem = str(error)
        row = judge(
            case.name,
            reference=reference,
            run=run,
            exit_code=result.exit_code,
            scripted=len(case.faults.faults) + (case.outside is not None),
            happened=fired + result.kills,
            seconds=result.seconds,
        )
        if problem is not None:
            row = Row(row.case, row.seconds, (*row.problems, problem), row.failovers)
        if row.passed:
            shutil.rmtree(folder)
        return row

    def _folder_of(self, case: Case) -> Path:
        """Its own: the name of a case of two faults begins as that of the first alone, which may run beside it."""
        setup, _, faults = case.name.partition("/")
        return self._folder / setup / faults.replace("/", "+")

    def _run(self, case: Case, folder: Path) -> JobResult:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        configuration = folder / "deepspeed.json"
        settings = case.setup.settings(self._base)
        settings["bamboo"]["faults"] = case.faults.to_json()
        configuration.write_text(json.dumps(settings), encoding="utf-8")
        arguments = case.setup.arguments(configuration=str(configuration), event_log=str(folder / "events"))
        script = [str(self._script), *arguments]
        return self._run_job(script, workers=case.setup.workers, folder=folder, outside=case.outside)
