"""Data of a worker that comes late: whether it is what the others have."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepspeed_bamboo.core.grid import Grid
from deepspeed_bamboo.core.placement import Placement
from deepspeed_bamboo.core.supplying import Claim
from deepspeed_bamboo.errors import ConfigError, ExpelledError, JobFailedError
from deepspeed_bamboo.runtime.iteration.micro_batches import PipelineData, checksum_of
from deepspeed_bamboo.runtime.iteration.step_history import StepHistory
from deepspeed_bamboo.runtime.iteration.supply import DataSupply


def batches(first: int = 0, count: int = 100) -> Iterator[Any]:
    return iter([(torch.full((2,), float(n)), {"labels": torch.tensor(n)}) for n in range(first, first + count)])


def test_a_late_workers_first_micro_batch_is_what_the_others_have_and_is_kept() -> None:
    other, late = PipelineData(0), PipelineData(0)
    other.set_iterator(batches(6))
    late.start_at(2, used=6)
    late.set_iterator(batches())
    assert late.guesses and not other.guesses
    assert late.first(step=2) == other.first(step=2) == late.first(step=2)
    assert late.get(0, 0, step=2)[0][0] == 6 and late.get(0, 1, step=2)[0][0] == 7
    late.forget(2)
    assert late.first(step=3) != other.first(step=3)


def test_the_scripts_function_for_batches_sees_those_that_a_late_worker_reads_past() -> None:
    """It may keep something from one to the next, as the generator of its masks."""
    late, counted = PipelineData(0), PipelineData(0)
    seen: dict[str, list[float]] = {"late": [], "counted": []}

    def noting(name: str) -> Callable[[Any], Any]:
        return lambda batch: seen[name].append(float(batch[0][0])) or batch

    late.start_at(2, used=6)
    late.set_iterator(batches())
    assert late.get(0, 0, step=2, transform=noting("late"))[0][0] == 6
    counted.pass_by(batches(), micro_batches=3, transform=noting("counted"))
    assert seen == {"late": [0, 1, 2, 3, 4, 5, 6], "counted": [0, 1, 2]}


def test_an_iterator_that_has_ended_is_nobodys_and_what_is_distrusted_is_not_read() -> None:
    late, taken = PipelineData(0), itertools.count()
    late.start_at(3, used=9)
    late.set_iterator((next(taken), batch) for batch in batches(count=5))  # type: ignore[misc]
    assert late.first(step=3) == {0: -1}
    late.distrusted = True
    assert not late.has(0) and late.first(step=3) == {}
    late.complete(3, step=3)
    assert next(taken) == 5


def test_only_a_guess_is_refused_when_another_iterator_comes() -> None:
    one, another = batches(), batches()
    late, counted, old = PipelineData(0), PipelineData(0), PipelineData(0)
    for data in (late, counted):
        data.start_at(1, used=3)
    counted.pass_by(batches(), micro_batches=3)
    for data in (late, counted, old):
        assert not data.would_guess(one)
        data.set_iterator(one)
        data.get(0, 0, step=1)
        assert not data.would_guess(one) and not data.would_guess(None)
    assert [data.would_guess(another) for data in (late, counted, old)] == [True, False, False]
    old.set_iterator(another)
    assert old.several and not late.several
    late.distrusted = True
    assert not late.would_guess(another)


def test_checksums_tell_batches_apart() -> None:
    same = [checksum_of(batch) for batch in (next(batches()), next(batches()))]
    others = [next(batches(1)), (torch.zeros(2, 1), {"labels": torch.tensor(0)}), (torch.zeros(2), 3)]
    assert same[0] == same[1] and len({same[0], *map(checksum_of, others)}) == 4


def test_a_step_is_done_again_with_its_own_number_of_samples() -> None:
    history = StepHistory()
    sizes = [(4, 2), (4, 2), (8, 2), (8, 2)]
    for step, size in enumerate(sizes):
        history.done(step, loss=1.0, size=size)
    assert [history.of(step).size for step in range(4)] == sizes and history.of(4).size is None
    assert history.plain_from == 2, "who has not seen the steps before can't know their size"


def failing_session() -> Any:
    """One in which the failure that is recorded is raised, as it is in a job."""
    said: list[Any] = []

    def check() -> None:
        if said:
            raise (
                ExpelledError(said[-1])
                if isinstance(said[-1], str)
                else JobFailedError(said[-1].message, origin=said[-1].worker)
            )

    coordinator = SimpleNamespace(
        fail=said.append,
        wait_for_machines=lambda record, *, reason, proposer: said.append(reason),
        epoch=lambda: SimpleNamespace(trains=False, reason=said[-1]),
    )
    interruption = SimpleNamespace(announce_failure=said.append, announce_expulsion=said.append, check=check)
    return SimpleNamespace(
        worker="a", coordinator=coordinator, interruption=interruption, with_retries=lambda call: call()
    )


@pytest.mark.parametrize("waits", [0.0, 60.0])
def test_the_loss_of_the_last_one_with_data_is_a_loss_and_no_fault_of_the_script(waits: float) -> None:
    """Where nobody ever had them it is one. A record that says for how long agents wait: all start anew."""
    grid, members = Grid(1, 2), ["a", "b"]
    record = SimpleNamespace(members=["a"], waits_seconds=waits, stores=bool(waits))
    worker: Any = SimpleNamespace(
        me="a",
        protects=True,
        record=record,
        grid=grid,
        session=failing_session(),
        placement=Placement.initial(grid, ["a"]),
    )
    given: dict[str, Any] = {"data": lambda: PipelineData(home=0), "transform": lambda: None}
    lost = DataSupply(worker, **given, table={"a": (), "b": (0,)})
    with pytest.raises(ExpelledError if waits else JobFailedError) as failed:
        lost.deliver(micro_batches=1, beforehand=False)
    assert "nobody is left who has the data of 0.0 (pipeline.stage): b, whose iterators had them, was lost" in str(
        failed.value
    )
    assert ("all workers start anew since" in str(failed.value)) == bool(waits)
    never = DataSupply(worker, **given, table=dict.fromkeys(members, ()))
    with pytest.raises(ConfigError, match=r"nobody has the data of 0\.0"):
        never.deliver(micro_batches=1, beforehand=False)
    had = {0: frozenset("a")}  # and passes none this time
    with pytest.raises(ConfigError, match=r"nobody has the evaluation data of 0\.0"):
        DataSupply(worker, **given, table={"a": ()}, evaluation=set(), had=had).deliver(
            micro_batches=1, beforehand=False
        )
    had = {0: frozenset("b")}  # and was lost between two evaluations
    with pytest.raises(ExpelledError if waits else JobFailedError):
        DataSupply(worker, **given, table={"a": ()}, evaluation=set(), had=had).deliver(
            micro_batches=1, beforehand=False
        )


def beginning(members: list[str], *, agree_on: Callable[[str, Any], Any]) -> Any:
    """The first of two workers, one for each stage, before step 0."""
    record = SimpleNamespace(members=members, placement=Placement.initial(Grid(1, 2), members), waits_seconds=0.0)
    return SimpleNamespace(
        me=members[0],
        is_reporter=True,
        session=SimpleNamespace(worker=members[0]),
        protects=True,
        step=0,
        record=record,
        grid=Grid(1, 2),
        agree_on=agree_on,
    )


@pytest.mark.parametrize("zeros", [False, True])
def test_iterators_that_differ_at_the_first_step_are_told(zeros: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """As those that yield zeros in place of what their stage doesn't need."""
    members, claims = ["a", "b"], {}
    x, y = torch.ones(2), torch.ones(2)
    for me, batch in (("a", (x, y * 0 if zeros else y)), ("b", (x * 0 if zeros else x, y))):
        data = PipelineData(home=0)
        data.set_iterator(iter([batch]))
        claims[me] = Claim((0,), (), data.first(step=0)).to_json()
    worker = beginning(members, agree_on=lambda label, claim: claims)
    DataSupply(worker, data=lambda: PipelineData(home=0), transform=lambda: None).agree()
    told = capsys.readouterr().err
    assert ("the data iterators of a and b begin with different micro-batches of pipeline 0" in told) == zeros
    assert ("no zeros in place of what its stage doesn't need" in told) == zeros


@pytest.mark.parametrize("same", [False, True])
def test_training_data_that_begin_with_others_than_the_iterator_are_told(
    same: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Looking at them takes nothing from either, and draws no number."""
    batches = [(torch.full((2,), float(n)), torch.zeros(2)) for n in range(3)]
    data, members, before = PipelineData(home=0), ["a", "b"], torch.get_rng_state()
    data.set_iterator(iter(batches))

    def factory(pipeline: int, step: int) -> Any:
        torch.rand(1)
        return iter(batches if same else batches[1:])

    data.set_factory(factory, for_last=(factory, lambda pipeline: False))
    worker = beginning(members, agree_on=lambda label, claim: dict.fromkeys(members, claim()))
    DataSupply(worker, data=lambda: data, transform=lambda: None).agree()
    assert ("begins with another micro-batch of pipeline 0 than the training_data" in capsys.readouterr().err) != same
    assert torch.equal(data.get(0, 0, step=0)[0], batches[0][0]) and torch.equal(torch.get_rng_state(), before)


def test_after_a_load_that_goes_back_one_step_a_factory_is_asked_again() -> None:
    """Who takes an end of the pipeline over asks it, too, and must get the same."""
    source = PipelineData(home=0)
    source.set_factory(lambda pipeline, step: iter(range(10 * step, 10 * step + 9)))
    assert [source.get(0, number, step=4) for number in range(2)] == [40, 41]
    source.complete(2, step=4)
    source.forget(4)
    source.resume_at(4)
    assert [source.get(0, number, step=4) for number in range(2)] == [40, 41]


def test_who_has_an_evaluations_data_is_told_before_the_last_one_is_lost(capsys: pytest.CaptureFixture[str]) -> None:
    members = ["a", "b", "c", "d"]
    record = SimpleNamespace(
        members=members, waits_seconds=0.0, stores=False, placement=Placement.initial(Grid(2, 2), members)
    )
    worker: Any = SimpleNamespace(
        me="a", is_reporter=True, session=failing_session(), protects=True, record=record, grid=Grid(2, 2)
    )
    given: dict[str, Any] = {"data": lambda: PipelineData(home=0), "transform": lambda: None}
    said: set[tuple[int, int]] = set()

    def told(table: dict[str, tuple[int, ...]]) -> str:
        DataSupply(worker, **given, table=table, evaluation=said).say_who_is_the_last()
        return capsys.readouterr().err

    each_its_own = {"a": (0,), "b": (0,), "c": (1,), "d": (1,)}
    first = told(each_its_own)
    assert first.count("evaluation data") == 1 and "only a and b have the evaluation data of pipeline 0" in first
    assert "evaluation=lambda pipeline, step: iterator" in first
    assert told(each_its_own) == "", "once"
    members.remove("c")
    assert "only d has the evaluation data of pipeline 1" in told(each_its_own)
    members.remove("d")
    supply = DataSupply(worker, **given, table=each_its_own, evaluation=said)
    worker.placement = Placement.initial(Grid(2, 2), members)
    worker.me = "b"
    with pytest.raises(JobFailedError, match=r"nobody is left who has the evaluation data of .*evaluation=") as failed:
        supply.deliver(micro_batches=1, beforehand=False)
    assert "c, d, whose iterators had them, were lost" in str(failed.value)
    everybody = dict.fromkeys(members, (0, 1))
    assert told(everybody) == ""
