"""Workers come, go and stand by: the same numbers as when nobody does (architecture 6)."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest

from deepspeed_bamboo.errors import ConfigError
from deepspeed_bamboo.eventlog.files import read_worker_files
from deepspeed_bamboo.eventlog.runs import runs_in
from tests.runtime.jobs import JobResult, Jobs
from tests.runtime.scenarios import Training, build, train_late_with_joiners, train_with_joiners
from tests.runtime.test_losses import BF16, CHECKED, CLIPPED, FP16, ZERO


def kill(step: int, pipeline: int, stage: int, at: str, micro_batch: int | None = None) -> dict[str, Any]:
    where = {"step": step, "pipeline": pipeline, "stage": stage, "at": at}
    return where if micro_batch is None else {**where, "micro_batch": micro_batch}


def undisturbed(jobs: Jobs, training: Training, *, world: int) -> JobResult:
    plain = dataclasses.replace(training, name=f"{training.name}-plain", faults=[])
    return jobs.run(train_with_joiners, world=world, training=plain, waits={})


def check_equal(result: JobResult, expected: JobResult) -> None:
    losses = expected.common("losses")
    for rank in result.survivors:
        own = result.values[rank]["losses"]
        assert own == {step: losses[step] for step in own}, f"rank {rank}"
    assert result.common("digest") == expected.common("digest")


def test_two_join_after_two_were_lost(jobs: Jobs, tmp_path: Path) -> None:
    faults = [kill(1, 0, 1, "backward", 1), kill(2, 0, 3, "forward", 2)]
    training = Training("rejoin-1x4", 4, steps=8, faults=faults, bamboo={"event_log": str(tmp_path)})
    expected = undisturbed(jobs, training, world=4)
    result = jobs.run(train_with_joiners, world=4, joining=2, joining_after_deaths=2, training=training, waits={"4": 2})
    assert result.survivors == [0, 2, 4, 5], result.transcript()
    check_equal(result, expected)
    assert [len(result.values[rank]["hosted"]) for rank in result.survivors] == [1, 1, 1, 1]
    assert result.values[4]["first"] == 5
    # The event says how many stages' states came: the one that it hosts now, and a shadow.
    assert [result.values[rank]["received"] for rank in (4, 5)] == [[2], [2]]
    whole, disturbed = runs_in(read_worker_files(tmp_path))
    assert whole.name and len(whole.files) == 4, "each start is a run, though files are continued"
    assert set(disturbed.files) == {f"events-w{rank}.jsonl" for rank in range(6)}, "and who joins belongs to it"


def test_joiners_fit_in_where_messages_are_used_ahead_and_shadows_step_late(jobs: Jobs) -> None:
    """Who joins has launched nothing yet, while others send before they compute the norm."""
    training = Training(
        "late-rejoin-1x2",
        2,
        steps=10,
        micro_batches=4,
        settings={**CLIPPED, **BF16},
        bamboo=CHECKED,
        faults=[kill(2, 0, 0, "backward", 1), kill(6, 0, 1, "forward", 2)],
    )
    expected = undisturbed(jobs, training, world=2)
    result = jobs.run(
        train_late_with_joiners, world=2, joining=2, joining_after_deaths=1, training=training, waits={"4": 2}
    )
    assert len(result.survivors) == 2, result.transcript()
    check_equal(result, expected)
    assert [len(result.values[rank]["hosted"]) for rank in result.survivors] == [1, 1]
    assert sum(result.values[rank].get("late", 0) for rank in result.survivors) > 0


def test_a_stand_by_takes_the_place_of_a_lost_worker(jobs: Jobs) -> None:
    training = Training(
        "stand-by-2x2", 2, steps=8, settings={"gradient_clipping": 0.05}, faults=[kill(4, 1, 0, "backward", 1)]
    )
    expected = undisturbed(jobs, training, world=4)
    result = jobs.run(train_with_joiners, world=4, joining=1, training=training, waits={"1": 1})
    assert result.survivors == [0, 2, 3, 4], result.transcript()
    check_equal(result, expected)
    # It is taken in before step 2, and takes the lost one's place in step 4.
    assert [len(now) for now in result.values[0]["members"]] == [4, 4, 5, 5, 4, 4, 4, 4]
    assert [rank for rank, output in result.outputs.items() if "stands by: every stage" in output] == [4]
    assert [len(result.values[rank]["hosted"]) for rank in result.survivors] == [1, 1, 1, 1]


@pytest.mark.sweep
def test_a_new_shadow_on_a_stand_by_counts_what_its_owner_did(jobs: Jobs) -> None:
    """Some steps were skipped before the loss. After each step owners and shadows are compared, counts too."""
    training = Training(
        "counts-1x3",
        3,
        steps=7,
        settings={**FP16, **ZERO},
        bamboo=CHECKED,
        faults=[kill(4, 0, 1, "backward", 1)],
    )
    expected = undisturbed(jobs, training, world=3)
    result = jobs.run(train_with_joiners, world=3, joining=1, training=training, waits={"1": 1})
    assert result.survivors == [0, 2, 3], result.transcript()
    check_equal(result, expected)


def test_a_notice_moves_everything_elsewhere_before_the_node_goes(jobs: Jobs) -> None:
    notice = {**kill(2, 0, 0, "forward", 1), "signal": "NOTICE", "seconds": 30.0}
    training = Training("notice-1x3", 3, steps=6, faults=[notice])
    expected = undisturbed(jobs, training, world=3)
    result = jobs.run(train_with_joiners, world=3, sites=["a/1", "b/1", "c/1"], training=training, waits={})
    assert (result.survivors, result.codes) == ([1, 2], [5, 0, 0]), result.transcript()
    check_equal(result, expected)
    assert [len(now) for now in result.values[1]["members"]] == [3, 3, 3, 2, 2, 2]


THREE = Training("die-1x3", 3, steps=5, faults=[])


@pytest.fixture(scope="module")
def three_undisturbed(jobs: Jobs) -> JobResult:
    return undisturbed(jobs, THREE, world=3)


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.sweep)])
def test_a_drained_worker_that_dies_when_all_has_moved_is_not_waited_for(
    jobs: Jobs, three_undisturbed: JobResult, rank: int
) -> None:
    """Rank 0 is also the one that decides. Nobody depends on what it has sent in its last moment."""
    notice = {**kill(2, 0, rank, "forward", 1), "signal": "NOTICE", "seconds": 30.0}
    training = dataclasses.replace(THREE, name=f"drained-dies{rank}-1x3", faults=[notice])
    result = jobs.run(
        train_with_joiners,
        world=3,
        sites=["a/1", "b/1", "c/1"],
        training=training,
        waits={},
        dies=(rank, "_adopt"),
        mute=(rank, "w2"),
    )
    assert result.survivors == sorted({0, 1, 2} - {rank}), result.transcript()
    assert result.codes[rank] == -9
    check_equal(result, three_undisturbed)


def test_a_worker_that_joins_and_has_only_an_iterator_skips_what_was_used(jobs: Jobs) -> None:
    training = Training("iterator-1x2", 2, steps=6, faults=[kill(1, 0, 0, "step")])
    expected = undisturbed(jobs, training, world=2)
    result = jobs.run(
        train_with_joiners,
        world=2,
        joining=1,
        joining_after_deaths=1,
        training=training,
        waits={"3": 1},
        own_iterator=True,
    )
    assert result.survivors == [1, 2], result.transcript()
    check_equal(result, expected)
    assert sorted(len(result.values[rank]["hosted"]) for rank in (1, 2)) == [1, 1]


@pytest.mark.parametrize(
    ("rank", "method"),
    [
        (3, "_move"),
        (0, "_take_in"),
        (1, "_adopt"),
        pytest.param(3, "_adopt", marks=pytest.mark.sweep),
        pytest.param(0, "_move", marks=pytest.mark.sweep),
        pytest.param(1, "_move", marks=pytest.mark.sweep),
        pytest.param(0, "_adopt", marks=pytest.mark.sweep),
    ],
)
def test_a_loss_in_the_middle_of_joining_costs_no_more_than_any_other(
    jobs: Jobs, three_undisturbed: JobResult, rank: int, method: str
) -> None:
    """Rank 3 is the one that joins, rank 0 the one that decides, rank 1 another."""
    training = dataclasses.replace(THREE, name=f"die{rank}{method}-1x3")
    result = jobs.run(
        train_with_joiners,
        world=3,
        joining=1,
        training=training,
        waits={"1": 1},
        dies=(rank, method),
        sites=["a/1", "b/1", "a/1", "b/1"],
    )
    assert result.survivors == sorted({0, 1, 2, 3} - {rank}), result.transcript()
    check_equal(result, three_undisturbed)


@pytest.mark.sweep
def test_neighbours_are_put_into_different_zones_at_the_first_boundary(jobs: Jobs) -> None:
    training = Training("zones-1x4", 4, steps=3, faults=[])
    expected = undisturbed(jobs, training, world=4)
    result = jobs.run(train_with_joiners, world=4, sites=["a/1", "b/1", "c/2", "d/2"], training=training, waits={})
    assert result.survivors == [0, 1, 2, 3], result.transcript()
    check_equal(result, expected)
    owners = result.common("placement")["owners"]
    zones = [{"w0": 1, "w1": 1, "w2": 2, "w3": 2}[owners[f"0.{stage}"]] for stage in range(4)]
    assert all(zone != zones[stage - 1] for stage, zone in enumerate(zones)), owners


@pytest.mark.sweep
def test_a_whole_zone_is_lost_at_once_without_a_neighbouring_pair_in_it(jobs: Jobs) -> None:
    at_once = [kill(1, 0, 1, "backward", 1), kill(1, 0, 4, "backward", 1)]
    training = Training("zone-1x6", 6, steps=4, faults=at_once)
    expected = undisturbed(jobs, training, world=6)
    sites = ["a/1", "b/2", "c/3", "d/1", "e/2", "f/3"]
    result = jobs.run(train_with_joiners, world=6, sites=sites, training=training, waits={})
    assert result.survivors == [0, 2, 3, 5], result.transcript()
    check_equal(result, expected)


@pytest.mark.sweep
def test_a_zone_is_survived_after_the_loss_of_a_worker_that_nobody_replaced(jobs: Jobs) -> None:
    """New shadows are made wherever that is quickest, here in their owners' zone, and leave it at a later boundary."""
    faults = [kill(1, 0, 1, "backward", 1), kill(11, 0, 0, "forward", 1)]
    training = Training("zones-again-1x4", 4, steps=13, faults=faults)
    expected = undisturbed(jobs, training, world=4)
    result = jobs.run(
        train_with_joiners,
        world=4,
        sites=["a/1", "b/2", "c/1", "d/2"],
        together=(0, 2),
        training=training,
        waits={},
        seconds=[0.001] * 4,
    )
    assert result.survivors == [3], result.transcript()
    check_equal(result, expected)


@pytest.mark.sweep
def test_with_several_pipelines_and_only_an_iterator_nobody_is_taken_in(jobs: Jobs) -> None:
    training = Training("iterator-2x2", 2, steps=4, faults=[])
    expected = undisturbed(jobs, training, world=4)
    result = jobs.run(train_with_joiners, world=4, joining=1, training=training, waits={"1": 1}, own_iterator=True)
    assert result.survivors == [0, 1, 2, 3], result.transcript()
    check_equal(result, expected)
    assert "workers w4 are not taken in" in result.transcript() and "set_data_source" in result.transcript()


def test_a_script_with_other_settings_or_another_model_is_refused(jobs: Jobs) -> None:
    training = Training("other-1x2", 2, steps=5, settings=CLIPPED, faults=[])
    expected = undisturbed(jobs, training, world=2)
    result = jobs.run(train_while_others_try, world=2, joining=3, training=training)
    assert result.survivors == [0, 1, 2, 3, 4], result.transcript()
    refused = {result.values[rank]["refused"] for rank in (2, 3, 4)}
    assert {text.partition(": ")[2].partition(";")[0] for text in refused} == {
        "optimizer.params.lr is 0.5 here and 0.01 in the job",
        "the model has 8 layers here and 6 in the job",
        "the parameters of stage 1 have other names, shapes or types than in the job",
    }
    assert all("can't join job" in text for text in refused)
    for rank in (0, 1):
        assert result.values[rank]["digest"] == expected.common("digest")


def train_while_others_try(training: Training) -> dict[str, Any]:
    """Those who come late have another learning rate, another number of layers, or layers with other parameters."""
    late = int(os.environ["RANK"]) - 2
    if late < 0:
        return train_with_joiners(training, waits={})
    other = [
        {"settings": {**CLIPPED, "optimizer": {"type": "AdamW", "params": {"lr": 0.5, "torch_adam": True}}}},
        {"count": training.count + 2},
        {"layers": "unbiased"},
    ][late]
    try:
        build(dataclasses.replace(training, **other))
    except ConfigError as error:
        return {"refused": str(error)}
    return {"refused": ""}


def test_with_several_pipelines_and_only_iterators_each_stands_in_for_its_own(jobs: Jobs) -> None:
    losses = [kill(1, 0, 1, "backward", 1), kill(3, 1, 0, "forward", 2)]
    training = Training("own-iterators-2x2", 2, steps=5, faults=losses)
    expected = undisturbed(jobs, training, world=4)
    result = jobs.run(train_with_joiners, world=4, training=training, waits={}, own_iterator=True)
    assert result.survivors == [0, 3], result.transcript()
    check_equal(result, expected)
    told = result.transcript()
    assert told.count("call engine.set_data_source") == 1
    assert "nobody else has the data of 0.0 0.1 (pipeline.stage): the loss of w0 ends the job" in told
    assert "nobody else has the data of 0.0 0.1 1.0 1.1 (pipeline.stage): the loss of w0 or w3 ends the job" in told
