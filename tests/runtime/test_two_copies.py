"""``redundancy.copies: 2``: any two workers lost at the same moment, and no step is done again."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest

from tests.runtime.jobs import JobResult, Jobs
from tests.runtime.scenarios import Training, train, train_with_joiners
from tests.runtime.test_checkpoints import SCHEDULE
from tests.runtime.test_losses import BF16, CHECKED, CLIPPED, FP16, SPIKES, ZERO, kill

TWO: dict[str, Any] = {**CHECKED, "redundancy": {"copies": 2}}
EAGER: dict[str, Any] = {**CHECKED, "redundancy": {"copies": 2, "mode": "eager", "offload": "cpu"}}
RECOMPUTED: dict[str, Any] = {**CHECKED, "redundancy": {"copies": 2, "mode": "eager", "offload": "recompute"}}
ONE_BY_FOUR = Training("two-1x4", 4, steps=4, dropout=0.3, settings={**CLIPPED, **SCHEDULE}, bamboo=TWO, faults=[])
# The first stage sends no gradient, and the last no activation: who is killed at that is always another one of the two.
KINDS = [
    ("idle", None),
    ("forward", 2),
    ("send_activation", 1),
    ("backward", 1),
    ("send_grad", 1),
    ("reduce", None),
    ("commit", None),
    ("step", None),
]
PAIRS = list(itertools.combinations(range(4), 2))

Undisturbed = Callable[..., JobResult]


@pytest.fixture(scope="module")
def undisturbed(jobs: Jobs) -> Undisturbed:
    """Runs a job with one shadow a stage in which nobody is lost; the same one is run once."""
    known: dict[str, JobResult] = {}

    def run(training: Training, *, body: Any = train, **options: Any) -> JobResult:
        plain = dataclasses.replace(training, bamboo={})
        key = repr((plain, body, options))
        if key not in known:
            known[key] = jobs.run(body, world=4, training=plain, **options)
        return known[key]

    return run


def check(result: JobResult, whole: JobResult, lost: tuple[int, ...]) -> None:
    assert [rank for rank, code in enumerate(result.codes) if code == -9] == sorted(lost), result.transcript()
    assert result.survivors == [rank for rank in range(4) if rank not in lost], result.transcript()
    assert "went back to step" not in result.transcript()
    for rank in result.survivors:
        for what in ("losses", "evaluations", "steps", "norm", "scale", "skipped", "digest"):
            assert result.values[rank][what] == whole.values[rank][what], f"{what} on rank {rank}"


def lose_both(
    jobs: Jobs, undisturbed: Undisturbed, training: Training, first: int, other: int, at: str, micro_batch: int | None
) -> None:
    """``first`` is killed at the instruction, and ``other`` at that moment, wherever it is."""
    stage, pipeline = divmod(first, 4 // training.stages)  # as ranks are numbered
    killed = dataclasses.replace(training, faults=[kill(2, pipeline, stage, at, micro_batch)])
    result = jobs.run(train, world=4, training=killed, together=(first, other))
    check(result, undisturbed(training), (first, other))


@pytest.mark.parametrize(("first", "other", "at"), [(1, 2, "backward"), (2, 1, "step")])
def test_a_stage_lost_with_its_shadow(jobs: Jobs, undisturbed: Undisturbed, first: int, other: int, at: str) -> None:
    lose_both(jobs, undisturbed, ONE_BY_FOUR, first, other, at, None if at == "step" else 1)


def orders(kinds: list[tuple[str, int | None]], *, last: int = 3) -> list[Any]:
    """Each pair in both orders, where the one that is killed at the instruction has it."""
    return [
        pytest.param(first, other, at, micro_batch, id=f"{first}-{other}-{at}")
        for at, micro_batch in kinds
        for pair in PAIRS
        for first, other in (pair, pair[::-1])
        if not (at == "send_activation" and first == last) and not (at == "send_grad" and first == 0)
    ]


@pytest.mark.sweep
@pytest.mark.parametrize(("first", "other", "at", "micro_batch"), orders(KINDS))
def test_any_two_of_four_at_every_kind_of_instruction(
    jobs: Jobs, undisturbed: Undisturbed, first: int, other: int, at: str, micro_batch: int | None
) -> None:
    lose_both(jobs, undisturbed, ONE_BY_FOUR, first, other, at, micro_batch)


@pytest.mark.sweep
@pytest.mark.parametrize("bamboo", [EAGER, RECOMPUTED], ids=["cpu", "recompute"])
@pytest.mark.parametrize(("first", "other", "at", "micro_batch"), orders([KINDS[1], KINDS[3], KINDS[5], KINDS[7]]))
def test_any_two_of_four_where_first_shadows_compute(
    jobs: Jobs,
    undisturbed: Undisturbed,
    bamboo: dict[str, Any],
    first: int,
    other: int,
    at: str,
    micro_batch: int | None,
) -> None:
    lose_both(jobs, undisturbed, dataclasses.replace(ONE_BY_FOUR, bamboo=bamboo), first, other, at, micro_batch)


@pytest.mark.sweep
@pytest.mark.parametrize("mode", [TWO, EAGER], ids=["lazy", "eager"])
@pytest.mark.parametrize(("at", "micro_batch"), KINDS)
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_each_at_its_own_instruction(
    jobs: Jobs,
    undisturbed: Undisturbed,
    pair: tuple[int, int],
    at: str,
    micro_batch: int | None,
    mode: dict[str, Any],
) -> None:
    """The second is lost where it is when it comes there: often in what is left of the step after the first loss."""
    ends = {"send_activation": 3, "send_grad": 0}
    at_end = [(stage, "forward" if ends.get(at) == stage else at) for stage in pair]
    faults = [kill(2, 0, stage, where, micro_batch) for stage, where in at_end]
    training = dataclasses.replace(ONE_BY_FOUR, faults=faults, bamboo=mode)
    check(jobs.run(train, world=4, training=training), undisturbed(ONE_BY_FOUR), pair)


MEANWHILE = ["interrupted", "reported", "regroup", "resume", "protect", "protected"]


@pytest.mark.sweep
@pytest.mark.parametrize("at", MEANWHILE)
@pytest.mark.parametrize("pair", [*PAIRS, *(pair[::-1] for pair in PAIRS)], ids=str)
def test_the_other_one_lost_during_the_recovery(
    jobs: Jobs, undisturbed: Undisturbed, pair: tuple[int, int], at: str
) -> None:
    mode = TWO if pair[0] < pair[1] else EAGER
    step = 3 if at == "protected" else 2
    faults = [kill(2, 0, pair[0], "forward", 2), kill(step, 0, pair[1], at)]
    training = dataclasses.replace(ONE_BY_FOUR, faults=faults, bamboo=mode)
    check(jobs.run(train, world=4, training=training), undisturbed(ONE_BY_FOUR), pair)


OTHERS = [
    Training("two-2x2", 2, steps=4, settings=CLIPPED, bamboo=TWO, faults=[]),
    Training("two-zero-2x2", 2, steps=4, settings={**CLIPPED, **ZERO}, bamboo=TWO, faults=[]),
    Training("two-bf16-2x2", 2, steps=4, layers="tied", settings={**CLIPPED, **BF16}, bamboo=TWO, faults=[]),
    Training("two-bf16-1x4", 4, steps=4, settings={**CLIPPED, **BF16}, bamboo=EAGER, faults=[]),
    Training("two-fp16-1x4", 4, steps=5, settings={**CLIPPED, **FP16}, spikes=SPIKES, bamboo=TWO, faults=[]),
    Training("two-buffers-1x4", 4, steps=4, layers="normalised", bamboo=TWO, faults=[]),
    Training("two-hooks-1x4", 4, steps=4, evaluate_before=(1, 2, 3), training_data=True, bamboo=TWO, faults=[]),
]


@pytest.mark.sweep
@pytest.mark.parametrize("training", OTHERS, ids=lambda training: training.name)
@pytest.mark.parametrize("pair", [pair[:: 1 if number % 2 else -1] for number, pair in enumerate(PAIRS)], ids=str)
@pytest.mark.parametrize(("at", "micro_batch"), [KINDS[3], KINDS[6], KINDS[7]])
def test_any_two_of_four_in_other_jobs(
    jobs: Jobs,
    undisturbed: Undisturbed,
    training: Training,
    pair: tuple[int, int],
    at: str,
    micro_batch: int | None,
) -> None:
    lose_both(jobs, undisturbed, training, *pair, at, micro_batch)


@pytest.mark.sweep
@pytest.mark.parametrize("pair", [(1, 2), (2, 1), (3, 2), (0, 3)], ids=str)
@pytest.mark.parametrize("training", [OTHERS[1], OTHERS[2]], ids=lambda training: training.name)
def test_while_parts_of_the_optimizer_are_gathered(
    jobs: Jobs, undisturbed: Undisturbed, training: Training, pair: tuple[int, int]
) -> None:
    lose_both(jobs, undisturbed, training, *pair, "gather", None)


@pytest.mark.sweep
def test_one_after_the_other_down_to_one(jobs: Jobs, undisturbed: Undisturbed) -> None:
    training = dataclasses.replace(ONE_BY_FOUR, name="two-down-1x4", steps=7)
    faults = [kill(1, 0, 1, "forward", 2), kill(3, 0, 3, "reduce"), kill(5, 0, 0, "backward", 1)]
    result = jobs.run(train, world=4, training=dataclasses.replace(training, faults=faults))
    check(result, undisturbed(training), (0, 1, 3))
    text = result.transcript()
    assert "every stage has two, any two workers may be lost at once again" in text
    assert "only w0 and w2 are left: every stage has one shadow, so either may be lost, not both at once" in text


@pytest.mark.sweep
def test_two_lost_at_once_and_two_come(jobs: Jobs, undisturbed: Undisturbed) -> None:
    """Who joins holds its stage and two shadows; then two more may go at once."""
    training = dataclasses.replace(ONE_BY_FOUR, name="two-join-1x4", steps=9)
    whole = undisturbed(training, body=train_with_joiners, waits={})
    faults = [kill(1, 0, 1, "backward", 1), kill(7, 0, 2, "forward", 1)]
    result = jobs.run(
        train_with_joiners,
        world=4,
        joining=2,
        joining_after_deaths=2,
        together=(1, 2),
        training=dataclasses.replace(training, faults=faults),
        waits={"4": 2},
    )
    losses = whole.common("losses")
    assert len(result.survivors) == 3, result.transcript()
    for rank in result.survivors:
        own = result.values[rank]["losses"]
        assert own == {step: losses[step] for step in own}
    assert result.common("digest") == whole.common("digest")
    assert [result.values[rank]["received"] for rank in result.survivors if rank >= 4] in ([[3]], [[3], [3]])


def test_what_is_said_with_too_few_workers_and_refused(jobs: Jobs) -> None:
    """On two workers there is no third copy; the job says so, and survives a loss."""
    training = dataclasses.replace(
        ONE_BY_FOUR, name="two-on-two", stages=2, count=4, steps=3, faults=[kill(1, 0, 1, "forward", 1)]
    )
    result = jobs.run(train, world=2, training=training)
    assert result.survivors == [0], result.transcript()
    assert "redundancy.copies is 2, but with 2 workers a stage has one shadow" in result.transcript()
