"""Scripts as people have them: they count their steps themselves, use one iterator, and do something after the loop."""

from __future__ import annotations

import dataclasses

import pytest

from tests.runtime.jobs import JobResult, Jobs
from tests.runtime.scenarios import Training, train_by_count, train_until_stopped


def undisturbed(jobs: Jobs, training: Training, *, world: int) -> JobResult:
    plain = dataclasses.replace(training, name=f"{training.name}-plain", faults=[])
    return jobs.run(train_by_count, world=world, training=plain, waits={})


def test_one_iterator_serves_all_evaluations_whoever_has_the_last_stage(jobs: Jobs) -> None:
    kill = {"step": 1, "pipeline": 0, "stage": 2, "at": "backward", "micro_batch": 1}
    training = Training("evaluated-1x3", 3, steps=4, evaluate_before=(0, 2, 3), faults=[kill])
    expected = undisturbed(jobs, training, world=3)
    result = jobs.run(train_by_count, world=3, training=training, waits={})
    assert result.survivors == [0, 1], result.transcript()
    for what in ("losses", "evaluations", "digest"):
        assert result.common(what) == expected.common(what)
    assert len(set(expected.common("evaluations"))) == 3


def test_a_script_that_counts_its_steps_catches_up_when_it_joins_and_ends_with_the_others(jobs: Jobs) -> None:
    """With tied layers, whose parameters stock broadcasts while it builds a stage."""
    kill = {"step": 1, "pipeline": 0, "stage": 2, "at": "backward", "micro_batch": 1}
    training = Training("counted-1x3", 3, layers="tied", steps=7, evaluate_before=(1, 5), faults=[kill])
    expected = undisturbed(jobs, training, world=3)
    result = jobs.run(train_by_count, world=3, joining=1, joining_after_deaths=1, training=training, waits={"3": 1})
    assert result.survivors == [0, 1, 3], result.transcript()
    assert result.common("digest") == expected.common("digest")
    assert result.common("steps") == 7
    for rank in (0, 1):
        assert result.values[rank]["losses"] == expected.common("losses")
        assert result.values[rank]["evaluations"] == expected.common("evaluations")
    late = result.values[3]
    assert late["losses"] == expected.common("losses"), "of the steps before it came, too"
    assert late["evaluations"] == expected.common("evaluations")
    assert late["hosted"] != [], "it has a part in the job"


def test_one_iterator_for_all_evaluations_goes_on_where_it_is_on_the_others(jobs: Jobs) -> None:
    """A late worker hosts one end of the pipeline: inputs and labels must be of the same samples."""
    kill = {"step": 1, "pipeline": 0, "stage": 0, "at": "backward", "micro_batch": 1}
    training = Training("late-1x2", 2, steps=7, evaluate_before=(0, 2, 4, 5), faults=[kill])
    expected = undisturbed(jobs, training, world=2)
    more = {"joining": 1, "joining_after_deaths": 1, "waits": {"3": 1}, "by_engine": True}
    result = jobs.run(train_by_count, world=2, training=training, **more)
    assert result.survivors == [1, 2], result.transcript()
    evaluations = expected.common("evaluations")
    assert result.values[1]["evaluations"] == evaluations and len(set(evaluations)) == 4
    late = result.values[2]
    assert late["hosted"] and late["evaluations"] == evaluations[4 - len(late["evaluations"]) :] != []


@pytest.mark.sweep
def test_a_late_worker_whose_iterator_is_elsewhere_gets_its_data_from_the_others(jobs: Jobs) -> None:
    """One iterator serves training and evaluations, so its place can't be known from the job's step."""
    kill = {"step": 1, "pipeline": 0, "stage": 0, "at": "backward", "micro_batch": 1}
    training = Training("mixed-1x2", 2, steps=7, evaluate_before=(0, 2, 5), faults=[kill])
    plain = dataclasses.replace(training, name="mixed-plain", faults=[])
    expected = jobs.run(train_by_count, world=2, training=plain, waits={}, one_iterator=True)
    more = {"joining": 1, "joining_after_deaths": 1, "waits": {"3": 1}, "by_engine": True, "one_iterator": True}
    result = jobs.run(train_by_count, world=2, training=training, **more)
    assert result.survivors == [1, 2], result.transcript()
    assert result.common("digest") == expected.common("digest") and result.values[2]["hosted"]
    assert result.values[1]["losses"] == expected.common("losses")
    assert result.values[1]["evaluations"] == expected.common("evaluations")
    assert "it gets its data from them" in result.transcript()


def test_what_comes_after_the_loop_is_done_when_the_job_is_stopped(jobs: Jobs) -> None:
    training = Training("stopped-1x2", 2, steps=5000, faults=[])
    result = jobs.run(train_until_stopped, world=2, training=training, stop_at=2)
    assert result.survivors == [0, 1] and result.codes == [0, 0], result.transcript()
    assert 2 < result.common("steps") < 5000
    assert len(result.common("digest")) == 64
