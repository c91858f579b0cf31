"""Losses that take the last live copy of a stage: the survivors go back to a checkpoint, and on, bit by bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deepspeed_bamboo.protocol import EXIT_EXPELLED, EXIT_JOB_FAILED
from tests.runtime.jobs import JobResult, Jobs
from tests.runtime.scenarios import Training, train, train_remembering
from tests.runtime.test_checkpoints import SCHEDULE
from tests.runtime.test_losses import BF16, CHECKED, CLIPPED, FP16, ZERO, kill

ONE_BY_FOUR = Training(
    "remembered-1x4", 4, steps=6, dropout=0.3, settings={**CLIPPED, **SCHEDULE}, bamboo=CHECKED, faults=[]
)
ALL_COPIES = {"checkpoint": {"memory_copies": 5}}

Undisturbed = Callable[..., JobResult]


@pytest.fixture(scope="module")
def undisturbed(jobs: Jobs) -> Undisturbed:
    """Runs a job in which nobody is lost; the same one is run once."""
    known: dict[str, JobResult] = {}

    def run(training: Training, *, world: int, body: Any = train, **options: Any) -> JobResult:
        key = repr((training, world, body, options))
        if key not in known:
            known[key] = jobs.run(body, world=world, training=training, **options)
        return known[key]

    return run


def pair(step: int, at: str, micro_batch: int | None = None) -> list[dict[str, Any]]:
    """The worker of stage 1, and the one that has its shadow."""
    return [kill(step, 0, stage, at, micro_batch) for stage in (0, 1)]


def check(result: JobResult, whole: JobResult, training: Training, *, lost: int, world: int) -> None:
    assert result.codes.count(-9) == lost and result.codes.count(0) == world - lost, result.transcript()
    found = whole.common("losses")
    losses = [found[str(step)] for step in range(training.steps)] if isinstance(found, dict) else found
    for rank in result.survivors:
        got = result.values[rank]
        assert [got["losses"][str(step)] for step in range(training.steps)] == losses, result.transcript()
        # All that is to be done again was done, and with the same bits.
        expected = [[s, losses[s]] for from_step, until, _ in got["restored"] for s in range(from_step, until)]
        assert got["redone"] == expected or len(got["restored"]) > 1, (got["redone"], expected)
        assert all(loss == losses[step] for step, loss in got["redone"]), (got["redone"], losses)
        for what in ("steps", "norm", "scale", "skipped"):
            assert got[what] == whole.values[rank][what], what
        if training.evaluate_before:
            assert got["evaluations"] == whole.common("evaluations")
    assert result.common("digest") == whole.common("digest")


@pytest.mark.parametrize("at", ["step"])
def test_owner_and_shadow_lost_at_once(jobs: Jobs, undisturbed: Undisturbed, at: str) -> None:
    whole = undisturbed(ONE_BY_FOUR, world=4)
    killed = dataclasses.replace(ONE_BY_FOUR, faults=pair(4, at))
    result = jobs.run(train_remembering, world=4, training=killed)
    check(result, whole, ONE_BY_FOUR, lost=2, world=4)
    assert result.survivors == [2, 3]
    [[from_step, until, _]] = result.values[2]["restored"]
    assert from_step < until == 5, result.values[2]["restored"]


def test_steps_are_done_again_in_the_modes_in_which_they_were_done(jobs: Jobs, undisturbed: Undisturbed) -> None:
    """Both are lost in an evaluation in inference mode, outside of the autocast in which the script trains."""
    training = dataclasses.replace(ONE_BY_FOUR, name="modes-1x4", evaluate_before=(4,))
    whole = undisturbed(training, world=4, body=train_remembering, modes=True)
    killed = dataclasses.replace(training, faults=pair(4, "forward", 1))
    result = jobs.run(train_remembering, world=4, training=killed, modes=True)
    check(result, whole, training, lost=2, world=4)
    assert result.values[2]["redone"], result.transcript()
    usual = undisturbed(training, world=4, body=train_remembering)
    assert usual.common("losses") != whole.common("losses"), "autocast changes nothing here"


COUNTING = Training(
    "counting-1x4", 4, steps=8, layers="counting", dropout=0.3, settings=CLIPPED, faults=[], bamboo=CHECKED
)
EVALUATED_CASES = [
    ((2, 4, 5, 6), pair(6, "backward", 1)),
    ((1, 2, 3, 4, 5, 6), pair(6, "forward", 1)),
    ((0, 4), pair(5, "step")),
    ((5, 6), [kill(5, 0, 2, "forward", 1), kill(6, 0, 3, "step")]),
]


@pytest.mark.parametrize(
    ("before", "faults"),
    [EVALUATED_CASES[0], *(pytest.param(*case, marks=pytest.mark.sweep) for case in EVALUATED_CASES[1:])],
)
def test_buffers_that_an_evaluation_moves_are_those_of_then_on_the_way_back(
    jobs: Jobs, undisturbed: Undisturbed, before: tuple[int, ...], faults: list[dict[str, Any]]
) -> None:
    training = dataclasses.replace(COUNTING, evaluate_before=before)
    whole = undisturbed(training, world=4, body=train_remembering)
    result = jobs.run(train_remembering, world=4, training=dataclasses.replace(training, faults=faults))
    check(result, whole, training, lost=2, world=4)
    assert "the script changes" not in result.transcript()
    if faults[0]["step"] == faults[1]["step"]:
        assert result.common("sources") == ["memory"], result.transcript()


STORED = dataclasses.replace(ONE_BY_FOUR, name="stored-1x4", steps=8, layers="tied")


def test_from_the_store_where_nothing_is_kept_in_memory(jobs: Jobs, undisturbed: Undisturbed, tmp_path: Path) -> None:
    whole = undisturbed(STORED, world=4)
    killed = dataclasses.replace(STORED, faults=pair(6, "idle"))
    result = jobs.run(train_remembering, world=4, training=killed, stored=str(tmp_path / "kept"))
    check(result, whole, STORED, lost=2, world=4)
    assert result.survivors == [2, 3] and result.common("sources") == ["store"]
    # That of step 4 is complete before all know of it.
    assert [found[:2] for found in result.values[2]["restored"]] in ([[4, 6]], [[1, 6]]), result.values[2]["restored"]


KINDS = [
    ("idle", None),
    ("forward", 2),
    ("send_activation", 1),
    ("backward", 1),
    ("reduce", None),
    ("commit", None),
]
# While the loss of another worker is recovered from.
MEANWHILE = ["interrupted", "reported", "regroup", "resume", "protect", "protected"]


@pytest.mark.sweep
@pytest.mark.parametrize(("at", "micro_batch"), KINDS)
def test_owner_and_shadow_lost_at_every_kind_of_instruction(
    jobs: Jobs, undisturbed: Undisturbed, at: str, micro_batch: int | None
) -> None:
    whole = undisturbed(ONE_BY_FOUR, world=4)
    killed = dataclasses.replace(ONE_BY_FOUR, faults=pair(4, at, micro_batch))
    result = jobs.run(train_remembering, world=4, training=killed)
    check(result, whole, ONE_BY_FOUR, lost=2, world=4)
    assert all(seconds < 10 for _, _, seconds in result.values[2]["restored"])


# Every kind of instruction that a step has, by who comes to it first. The first stage sends no gradient.
EVERY_KIND = [*KINDS[:4], ("send_grad", 1), *KINDS[4:], ("step", None)]
IN_AN_INSTANT = [(first, *kind) for first in (1, 0) for kind in EVERY_KIND if first or kind[0] != "send_grad"]


@pytest.mark.sweep
@pytest.mark.parametrize(("first", "at", "micro_batch"), IN_AN_INSTANT)
def test_owner_and_shadow_killed_in_the_same_instant(
    jobs: Jobs, undisturbed: Undisturbed, first: int, at: str, micro_batch: int | None
) -> None:
    """One at the instruction, the other wherever it is then. Two go on in their processes, in less than ten seconds."""
    whole = undisturbed(ONE_BY_FOUR, world=4)
    killed = dataclasses.replace(ONE_BY_FOUR, faults=[kill(4, 0, first, at, micro_batch)])
    result = jobs.run(train_remembering, world=4, training=killed, together=(0, 1))
    check(result, whole, ONE_BY_FOUR, lost=2, world=4)
    assert result.survivors == [2, 3] and result.common("sources") == ["memory"]
    assert all(result.values[rank]["longest_seconds"] < 10 for rank in result.survivors), result.values


@pytest.mark.sweep
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("kind", ["idle", "forward", "step"])
@pytest.mark.parametrize("at", MEANWHILE[:-1])
def test_the_other_one_lost_during_the_recovery(
    jobs: Jobs, undisturbed: Undisturbed, at: str, kind: str, first: int
) -> None:
    """Where the second loss comes too late to be fatal, nothing is done again."""
    whole = undisturbed(ONE_BY_FOUR, world=4)
    # After the step that others have agreed upon, its recovery counts as the next one's.
    step = 5 if kind == "step" else 4
    faults = [kill(4, 0, first, kind, 1 if kind == "forward" else None), kill(step, 0, 1 - first, at)]
    result = jobs.run(train_remembering, world=4, training=dataclasses.replace(ONE_BY_FOUR, faults=faults))
    lost = result.codes.count(-9)
    assert lost == 2 or (lost == 1 and at in ("protect", "resume")), result.transcript()
    check(result, whole, ONE_BY_FOUR, lost=lost, world=4)


@pytest.mark.sweep
@pytest.mark.parametrize("at", MEANWHILE)
def test_all_but_one_lost(jobs: Jobs, undisturbed: Undisturbed, at: str) -> None:
    whole = undisturbed(ONE_BY_FOUR, world=4)
    step = 5 if at == "protected" else 4  # which is said at the next boundary
    faults = [kill(4, 0, 2, "forward", 1), kill(step, 0, 0, at), kill(step, 0, 1, at)]
    killed = dataclasses.replace(ONE_BY_FOUR, faults=faults, bamboo={**CHECKED, **ALL_COPIES})
    result = jobs.run(train_remembering, world=4, training=killed)
    check(result, whole, ONE_BY_FOUR, lost=3, world=4)


# The last stage sends no activation, so there nobody would be killed at that.
LEFT = [(left, *kind) for left in range(4) for kind in (*KINDS, ("step", None)) if left == 3 or "send" not in kind[0]]


@pytest.mark.sweep
@pytest.mark.parametrize(("left", "at", "micro_batch"), LEFT)
def test_all_but_one_lost_at_once(
    jobs: Jobs, undisturbed: Undisturbed, left: int, at: str, micro_batch: int | None
) -> None:
    whole = undisturbed(ONE_BY_FOUR, world=4)
    faults = [kill(4, 0, stage, at, micro_batch) for stage in range(4) if stage != left]
    killed = dataclasses.replace(ONE_BY_FOUR, faults=faults, bamboo={**CHECKED, **ALL_COPIES})
    result = jobs.run(train_remembering, world=4, training=killed)
    check(result, whole, ONE_BY_FOUR, lost=3, world=4)


@pytest.mark.sweep
@pytest.mark.parametrize(("at", "micro_batch"), [("forward", 1), ("step", None)])
def test_all_but_one_lost_of_four_workers_with_six_stages(
    jobs: Jobs, undisturbed: Undisturbed, at: str, micro_batch: int | None
) -> None:
    training = dataclasses.replace(ONE_BY_FOUR, name="blocks-1x6", stages=6)
    whole = undisturbed(training, world=4)
    faults = [kill(4, 0, stage, at, micro_batch) for stage in (0, 2, 4)]
    result = jobs.run(
        train_remembering, world=4, training=dataclasses.replace(training, faults=faults, bamboo=ALL_COPIES)
    )
    check(result, whole, training, lost=3, world=4)


@pytest.mark.sweep
@pytest.mark.parametrize("how", ["flipped", "truncated", "missing", "foreign"])
def test_a_damaged_newest_copy_is_passed_over(jobs: Jobs, undisturbed: Undisturbed, how: str) -> None:
    """Nobody's copy of one stage is whole: the checkpoint before is taken."""
    whole = undisturbed(ONE_BY_FOUR, world=4)
    # At a backward, when all have begun the step, and so have damaged what they have.
    killed = dataclasses.replace(ONE_BY_FOUR, faults=pair(4, "backward", 1))
    result = jobs.run(train_remembering, world=4, training=killed, damages=(4, how))
    check(result, whole, ONE_BY_FOUR, lost=2, world=4)
    [[from_step, _, _]] = result.values[2]["restored"]
    assert from_step < min(result.values[2]["damaged"]), (from_step, result.values[2]["damaged"])


VARIANTS = [
    (Training("bf16-tied", 4, layers="tied", settings={**CLIPPED, **SCHEDULE, **BF16}), {}),
    (Training("fp16", 4, steps=7, settings={**CLIPPED, **FP16}, spikes=(1, 4)), {}),
    (Training("evaluated", 4, dropout=0.3, evaluate_before=(0, 2, 3, 4, 5)), {}),
    (Training("buffers", 4, layers="normalised"), {}),
    (Training("data-set", 4, training_data=True), {}),
    (Training("one-iterator", 4), {"shared_iterator": True}),
    (Training("writes", 4), {"writes": True}),
    (Training("eager", 4, bamboo={"redundancy": {"mode": "eager"}}), {}),
    (Training("zero", 4, settings={**CLIPPED, **ZERO, **BF16}), {}),
    (Training("paced", 4, bamboo={"checkpoint": {"memory_megabytes_per_second": 0.5}}), {}),
]


@pytest.mark.sweep
@pytest.mark.parametrize(("at", "micro_batch"), [("forward", 1), ("step", None)])
@pytest.mark.parametrize(("training", "options"), [pytest.param(*case, id=case[0].name) for case in VARIANTS])
def test_whatever_is_trained(
    jobs: Jobs, undisturbed: Undisturbed, training: Training, options: dict[str, Any], at: str, micro_batch: int | None
) -> None:
    training = dataclasses.replace(training, steps=max(6, training.steps), faults=[])
    whole = undisturbed(training, world=4, body=train_remembering, **options)
    killed = dataclasses.replace(training, faults=pair(4, at, micro_batch))
    result = jobs.run(train_remembering, world=4, training=killed, **options)
    check(result, whole, training, lost=2, world=4)


@pytest.mark.sweep
@pytest.mark.parametrize("source", ["memory", "store"])
@pytest.mark.parametrize(("at", "micro_batch"), KINDS)
def test_what_the_script_sets_in_layers_before_steps_that_are_done_again(
    jobs: Jobs, undisturbed: Undisturbed, tmp_path: Path, source: str, at: str, micro_batch: int | None
) -> None:
    training = Training("anneals", 4, layers="annealed", steps=9, faults=[])
    whole = undisturbed(training, world=4, body=train_remembering, anneals=True)
    killed = dataclasses.replace(training, faults=pair(7, at, micro_batch))
    folder = str(tmp_path / "kept") if source == "store" else None
    result = jobs.run(train_remembering, world=4, training=killed, anneals=True, stored=folder)
    check(result, whole, training, lost=2, world=4)
    assert result.common("sources") == [source]


# SGD, unlike Adam, does not even out how gradients are scaled.
SLOW = {"optimizer": {"type": "SGD", "params": {"lr": 0.3}}}
FP16_SET = {"fp16": {"enabled": True, "loss_scale": 64}}
BY_HAND = [
    *((kind, {**CLIPPED, **SLOW, **BF16}) for kind in ("clip once", "clip")),
    ("clip once", {**CLIPPED, **SLOW, **ZERO, **BF16}),
    *((kind, {**CLIPPED, **SLOW, **FP16_SET}) for kind in ("scale", "scale once", "override", "override once")),
    ("scale once", {**CLIPPED, **SLOW, **FP16, **ZERO}),
    *((kind, CLIPPED) for kind in ("root", "root once", "number", "late", "pace")),
]


WHERE_BY_HAND = [(at, source) for source in ("memory", "store") for at in ("idle", "forward", "step")]
BY_HAND_CASES = [(*case, *where) for case in BY_HAND for where in WHERE_BY_HAND]


@pytest.mark.parametrize(
    ("sets", "settings", "at", "source"),
    [
        pytest.param(
            *case, marks=() if case in (BY_HAND_CASES[0], ("pace", CLIPPED, *WHERE_BY_HAND[1])) else pytest.mark.sweep
        )
        for case in BY_HAND_CASES
    ],
)
def test_what_the_script_sets_by_hand_is_set_again_before_steps_that_are_done_again(
    jobs: Jobs,
    undisturbed: Undisturbed,
    tmp_path: Path,
    sets: str,
    settings: dict[str, Any],
    at: str,
    source: str,
) -> None:
    """Beside parameter groups: how gradients are clipped, the scale of the loss, attributes of the PipelineModule."""
    training = Training("by-hand", 4, steps=10, settings=settings, faults=[], bamboo=CHECKED)
    whole = undisturbed(training, world=4, body=train_remembering, sets=sets)
    killed = dataclasses.replace(training, faults=pair(7, at, 2 if at == "forward" else None))
    folder = str(tmp_path / "kept") if source == "store" else None
    result = jobs.run(train_remembering, world=4, training=killed, sets=sets, stored=folder)
    check(result, whole, training, lost=2, world=4)
    assert result.common("sources") == [source]


@pytest.mark.parametrize("sets", ["weights once", pytest.param("share once", marks=pytest.mark.sweep)])
def test_nobody_goes_back_past_a_first_change_of_weights_by_hand(jobs: Jobs, sets: str) -> None:
    """In the step after it, or before that step: it could not be done again, so the job ends and says so."""
    faults = pair(6, "forward", 1) if sets == "weights once" else []
    training = Training("changed-1x4", 4, steps=8, settings=CLIPPED, bamboo=CHECKED, faults=faults)
    result = jobs.run(train_remembering, world=4, training=training, sets=sets)
    assert result.codes.count(-9) == 2 and result.survivors == [], result.transcript()
    assert "by hand since step 6, which could not be done again" in result.transcript()


STORED_VARIANTS = [case for case in VARIANTS if case[0].name not in ("eager", "paced")]


@pytest.mark.sweep
@pytest.mark.parametrize("at", ["idle", "step"])
@pytest.mark.parametrize(("training", "options"), [pytest.param(*case, id=case[0].name) for case in STORED_VARIANTS])
def test_from_the_store_whatever_is_trained(
    jobs: Jobs,
    undisturbed: Undisturbed,
    tmp_path: Path,
    training: Training,
    options: dict[str, Any],
    at: str,
) -> None:
    training = dataclasses.replace(training, steps=9, faults=[])
    whole = undisturbed(training, world=4, body=train_remembering, **options)
    killed = dataclasses.replace(training, faults=pair(6, at))
    result = jobs.run(train_remembering, world=4, training=killed, stored=str(tmp_path / "kept"), **options)
    check(result, whole, training, lost=2, world=4)
    assert result.common("sources") == ["store"]


@pytest.mark.sweep
@pytest.mark.parametrize(("at", "micro_batch"), [*KINDS, ("step", None), ("save", None)])
def test_from_the_store_after_a_loss_at_every_kind_of_instruction(
    jobs: Jobs, undisturbed: Undisturbed, tmp_path: Path, at: str, micro_batch: int | None
) -> None:
    whole = undisturbed(STORED, world=4)
    faults = [kill(7 if at == "save" else 6, 0, stage, at, micro_batch) for stage in (0, 1, 2)]
    result = jobs.run(
        train_remembering,
        world=4,
        training=dataclasses.replace(STORED, faults=faults),
        stored=str(tmp_path / "kept"),
    )
    check(result, whole, STORED, lost=3, world=4)
    assert result.common("sources")[0] == "store"


@pytest.mark.sweep
def test_from_the_store_where_memory_has_lost_some_stages(jobs: Jobs, undisturbed: Undisturbed, tmp_path: Path) -> None:
    """Which of both is taken where both are whole: tests/core/test_restoring.py."""
    whole = undisturbed(STORED, world=4)
    killed = dataclasses.replace(
        STORED,
        faults=[kill(6, 0, stage, "idle") for stage in (0, 1, 2)],
        bamboo={"checkpoint": {"memory_interval_seconds": 1e-9}},
    )
    result = jobs.run(train_remembering, world=4, training=killed, stored=str(tmp_path / "kept"))
    check(result, whole, STORED, lost=3, world=4)
    assert result.common("sources") == ["store"]


@pytest.mark.sweep
def test_another_one_lost_while_it_reads_the_store(jobs: Jobs, undisturbed: Undisturbed, tmp_path: Path) -> None:
    whole = undisturbed(STORED, world=4)
    killed = dataclasses.replace(STORED, faults=[*pair(6, "idle"), *(kill(s, 0, 2, "load") for s in (4, 6))])
    result = jobs.run(train_remembering, world=4, training=killed, stored=str(tmp_path / "kept"))
    check(result, whole, STORED, lost=3, world=4)
    # Both read stage 2, for its owner and for its shadow: who comes to it first is lost.
    assert result.survivors in ([2], [3]) and result.common("sources") == ["store"]


@pytest.mark.sweep
@pytest.mark.parametrize("how", ["flipped", "truncated", "missing", "foreign"])
def test_a_damaged_newest_one_in_the_store_is_passed_over(
    jobs: Jobs, undisturbed: Undisturbed, tmp_path: Path, how: str
) -> None:
    training = dataclasses.replace(STORED, steps=11)
    whole = undisturbed(training, world=4)
    killed = dataclasses.replace(training, faults=pair(9, "backward", 1))
    result = jobs.run(train_remembering, world=4, training=killed, damages=(9, how), stored=str(tmp_path / "kept"))
    check(result, whole, training, lost=2, world=4)
    [[from_step, _, _]] = result.values[2]["restored"]
    assert from_step < max(result.values[3]["damaged"]), (from_step, result.values[3]["damaged"])
    assert "is damaged" in result.transcript()


@pytest.mark.sweep
@pytest.mark.parametrize(("seconds", "code"), [(0.0, EXIT_JOB_FAILED), (60.0, EXIT_EXPELLED)])
def test_without_a_good_checkpoint_in_the_store_all_start_anew_or_the_job_ends(
    jobs: Jobs, tmp_path: Path, seconds: float, code: int
) -> None:
    early = dataclasses.replace(STORED, name="early-stored-1x4", faults=pair(1, "forward", 1))
    bamboo = {**early.bamboo, "topology": {"wait_for_machines_seconds": seconds}}
    early = dataclasses.replace(early, bamboo=bamboo)
    result = jobs.run(train_remembering, world=4, training=early, stored=str(tmp_path / "kept"))
    assert sorted(code for code in result.codes if code is not None) == [-9, -9, code, code], result.transcript()
    words = "all workers start anew" if seconds else "no live worker holds the state of 0.1"
    assert words in result.transcript() and f"and none in {tmp_path / 'kept'}" in result.transcript()


def check_losses(result: JobResult, whole: JobResult) -> None:
    """Also of workers that came late: what each has seen, and what was done again, is the undisturbed job's."""
    losses = whole.common("losses")
    for rank in result.survivors:
        got = result.values[rank]
        assert all(loss == losses[int(step)] for step, loss in got["losses"].items()), got["losses"]
        assert all(loss == losses[step] for step, loss in got["redone"])


TWO_BY_THREE = Training("half-2x3", 3, steps=14, settings={**CLIPPED, **BF16}, bamboo=CHECKED, faults=[])
ZONE = ((0, 0), (0, 1), (1, 2))


@pytest.mark.sweep
@pytest.mark.parametrize("settings", [BF16, {**ZERO, **BF16}, {}], ids=["bf16", "zero", "fp32"])
@pytest.mark.parametrize(("at", "micro_batch"), [("idle", None), ("forward", 1), ("reduce", None), ("step", None)])
def test_half_of_all_workers_at_once_and_then_two_join(
    jobs: Jobs, undisturbed: Undisturbed, at: str, micro_batch: int | None, settings: dict[str, Any]
) -> None:
    """A zone of two: copies are in the other one, wherever stages are."""
    training = dataclasses.replace(TWO_BY_THREE, settings={**CLIPPED, **settings})
    whole = undisturbed(training, world=6)
    zone = ZONE if settings else ((0, 0), (1, 0), (0, 2), (1, 2))
    faults = [kill(4, pipeline, stage, at, micro_batch) for pipeline, stage in zone]
    killed = dataclasses.replace(training, faults=faults, bamboo={"checkpoint": {"memory_copies": 3}})
    lost = len(zone)
    result = jobs.run(train_remembering, world=6, joining=2, joining_after_deaths=lost, training=killed, waits={"7": 2})
    assert result.codes.count(-9) == lost and result.codes.count(0) == 8 - lost, result.transcript()
    check_losses(result, whole)
    survivor = result.values[min(result.survivors)]
    assert len(survivor["losses"]) == training.steps and survivor["members"][-1] == 8 - lost, survivor["members"]
    assert result.common("digest") == whole.common("digest")


# The ranks of ZONE, of which the one that has a stage in the middle comes to every kind of instruction.
ZONE_RANKS, INNER = (0, 2, 5), (0, 1)
IN_ZONES = tuple(f"n{rank}/{'a' if rank in ZONE_RANKS else 'b'}" for rank in range(6))


@pytest.mark.sweep
@pytest.mark.parametrize("sites", [(), IN_ZONES], ids=["unknown", "known"])
@pytest.mark.parametrize(("at", "micro_batch"), EVERY_KIND)
def test_a_zone_with_half_of_all_workers_in_an_instant_and_then_two_join(
    jobs: Jobs, undisturbed: Undisturbed, at: str, micro_batch: int | None, sites: tuple[str, ...]
) -> None:
    """Where zones are known shadows are in the other one, and no step is done again; else all go back to memory."""
    whole = undisturbed(TWO_BY_THREE, world=6)
    killed = dataclasses.replace(
        TWO_BY_THREE,
        faults=[kill(4, *INNER, at, micro_batch)],
        bamboo={**CHECKED, "checkpoint": {"memory_copies": 1 if sites else 3}},
    )
    result = jobs.run(
        train_remembering,
        world=6,
        joining=2,
        joining_after_deaths=3,
        sites=sites,
        together=ZONE_RANKS,
        training=killed,
        waits={"7": 2},
    )
    assert [rank for rank, code in enumerate(result.codes) if code == -9] == list(ZONE_RANKS), result.transcript()
    assert result.codes.count(0) == 5, result.transcript()
    check_losses(result, whole)
    survivor = result.values[min(result.survivors)]
    assert survivor["sources"] == ([] if sites else ["memory"]), survivor["restored"]
    assert bool(survivor["redone"]) == bool([way for way in survivor["restored"] if way[0] < way[1]])
    assert len(survivor["losses"]) == TWO_BY_THREE.steps and survivor["members"][-1] == 5, survivor["members"]
    assert result.common("digest") == whole.common("digest")


@pytest.mark.sweep
@pytest.mark.parametrize("settings", [BF16, {**ZERO, **BF16}], ids=["bf16", "zero"])
def test_from_the_store_after_half_of_all_workers_and_then_two_join(
    jobs: Jobs, undisturbed: Undisturbed, tmp_path: Path, settings: dict[str, Any]
) -> None:
    training = dataclasses.replace(TWO_BY_THREE, name="stored-2x3", settings={**CLIPPED, **settings})
    whole = undisturbed(training, world=6)
    faults = [kill(6, pipeline, stage, "idle") for pipeline, stage in ZONE]
    killed = dataclasses.replace(training, faults=faults)
    result = jobs.run(
        train_remembering,
        world=6,
        joining=2,
        joining_after_deaths=3,
        training=killed,
        waits={"9": 2},
        stored=str(tmp_path / "kept"),
    )
    assert result.codes.count(-9) == 3 and result.codes.count(0) == 5, result.transcript()
    check_losses(result, whole)
    survivor = result.values[min(result.survivors)]
    assert survivor["sources"] == ["store"] and survivor["members"][-1] == 5
    assert result.common("digest") == whole.common("digest")


@pytest.mark.sweep
def test_losses_while_a_state_is_restored_and_on_the_way_back(jobs: Jobs) -> None:
    """Four of five, in an order in which each time the last copy of something goes."""
    training = dataclasses.replace(ONE_BY_FOUR, name="again-1x5", stages=5, count=5, steps=9)
    whole = jobs.run(train, world=5, training=training)
    faults = [*pair(4, "forward", 2), kill(3, 0, 3, "backward", 1), kill(7, 0, 4, "commit")]
    killed = dataclasses.replace(training, faults=faults, bamboo={"checkpoint": {"memory_copies": 4}})
    result = jobs.run(train_remembering, world=5, training=killed)
    check(result, whole, training, lost=4, world=5)


@pytest.mark.sweep
def test_without_a_copy_the_job_ends_as_it_did(jobs: Jobs) -> None:
    early = dataclasses.replace(ONE_BY_FOUR, name="early-1x4", faults=pair(0, "forward", 1))
    result = jobs.run(train_remembering, world=4, training=early)
    assert result.survivors == [] and "no live worker holds the state of 0.1" in result.transcript()
    assert "no memory checkpoint" in result.transcript()
