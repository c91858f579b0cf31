"""Who waits in which call, without processes; ``test_user_errors.py`` has the real ones."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import pytest

from deepspeed_bamboo.coordination import JobCoordinator, Member
from deepspeed_bamboo.coordination.memory import MemoryStore
from deepspeed_bamboo.runtime.job.mismatched_calls import MESSAGE, Where, Whereabouts


class Worker:
    """One that looks at where it is; ``late``: it came to the running job."""

    def __init__(self, coordinator: JobCoordinator, name: str, members: Sequence[str], *, late: bool = False) -> None:
        self.here: Where | None = None
        self.left: list[str] = []
        self.needed = False
        coordinator.register(Member(name, "n", "z", "a", 1, 1, 0, joining=late), lease_seconds=60.0)
        self._whereabouts = Whereabouts(
            coordinator, worker=name, where=lambda: self.here, members=lambda: members, leave=self._leave
        )

    def _leave(self, why: str) -> bool:
        self.left.append(why)
        return not self.needed

    def looks(self, *places: Where | None) -> None:
        """Once at each of ``places``, where it is then."""
        for self.here in places:
            self._whereabouts.look()


class Job:
    """Workers ``w0`` and so on, of which those of ``late`` came late."""

    def __init__(self, count: int, late: Collection[int] = ()) -> None:
        self.coordinator = JobCoordinator(MemoryStore(), job="job")
        names = [f"w{index}" for index in range(count)]
        self.workers = [Worker(self.coordinator, name, names, late=n in late) for n, name in enumerate(names)]

    @property
    def message(self) -> str | None:
        failure = self.coordinator.failure()
        return None if failure is None else failure.message

    @property
    def left(self) -> list[int]:
        """Who has left alone."""
        return [index for index, worker in enumerate(self.workers) if worker.left and not worker.needed]


def verdict(first: list[Where | None], second: list[Where | None]) -> str | None:
    job = Job(2)
    job.workers[0].looks(*first)
    job.workers[1].looks(*second)
    return job.message


TRAIN, SAVE = Where(0, 3, "train"), Where(0, 3, "save")


def test_different_calls_in_the_same_place_are_a_contradiction() -> None:
    message = verdict([TRAIN, TRAIN], [SAVE, SAVE])
    assert message is not None and "w1: save_checkpoint; w0: train_batch" in message


def test_nothing_is_concluded_from_what_may_be_over_soon_or_is_elsewhere() -> None:
    assert verdict([TRAIN, TRAIN], [SAVE, None, SAVE]) is None
    assert verdict([TRAIN, TRAIN], [TRAIN, TRAIN]) is None
    assert verdict([TRAIN, TRAIN], [SAVE._replace(number=4)] * 2) is None
    assert verdict([TRAIN, TRAIN], [SAVE._replace(epoch=1)] * 2) is None


WAITS = TRAIN._replace(kind=MESSAGE, awaited=(("w0", "targets/4"),))
"""Before that call, for what w0 has yet to send."""


def test_whoever_waits_for_a_message_of_one_that_waits_for_it_ends_the_job_once_that_is_sure() -> None:
    assert verdict([TRAIN, TRAIN], [WAITS] * 5) is None, "a large message may be on its way"
    message = verdict([TRAIN, TRAIN], [WAITS] * 6)
    assert (
        message is not None and "w1 waits for a message from w0" in message and "waits for w1: train_batch" in message
    )
    for elsewhere in (TRAIN._replace(number=2), TRAIN._replace(epoch=1), TRAIN._replace(kind=MESSAGE), None):
        assert verdict([elsewhere, elsewhere], [WAITS] * 9) is None
    others = [WAITS._replace(awaited=(("w0", f"targets/{number}"),)) for number in range(9)]
    assert verdict([TRAIN, TRAIN], others) is None, "it goes on"


def test_nothing_is_concluded_by_others_from_a_wait_for_a_message_which_may_be_over() -> None:
    assert verdict([WAITS, WAITS], [TRAIN] * 9) is None
    job = Job(3, late=[1])
    job.workers[0].looks(TRAIN, TRAIN)
    job.workers[1].looks(*[WAITS] * 5)
    assert job.left == []
    job.workers[1].looks(*[WAITS] * 9)
    assert job.message is None and job.left == [1], "one that came late leaves alone"


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 2, 0]])
def test_one_that_came_late_and_differs_leaves_alone(order: list[int]) -> None:
    """In whatever order they come, and however often they look."""
    job = Job(3, late=[2])
    for index in order:
        job.workers[index].looks(*[SAVE if index == 2 else TRAIN] * 2)
    for index in (0, 1, 2):
        job.workers[index].looks(job.workers[index].here)
    assert (job.left, job.message) == ([2], None)
    assert "w2: save_checkpoint" in job.workers[2].left[0] and "it alone leaves" in job.workers[2].left[0]


def test_of_two_the_one_that_came_late_leaves() -> None:
    job = Job(2, late=[0])
    job.workers[0].looks(SAVE, SAVE)
    job.workers[1].looks(TRAIN, TRAIN, TRAIN)
    job.workers[0].looks(SAVE)
    assert (job.left, job.message) == ([0], None)


@pytest.mark.parametrize(
    ("late", "saving"),
    [
        ([], [2]),  # nobody came late
        ([2], [1]),  # another one differs
        ([2], [1, 2]),  # it does what one of the first does
        ([1, 2], [1, 2]),  # the majority came late
        ([0, 1, 2], []),  # all came late; below each makes another call
    ],
)
def test_where_others_differ_or_more_than_half_came_late_the_job_ends(late: list[int], saving: list[int]) -> None:
    job = Job(3, late=late)
    for _ in range(8):
        for index, worker in enumerate(job.workers):
            other = SAVE if saving else SAVE._replace(kind=["save", "train", "load"][index])
            worker.looks(*[other if index in saving or not saving else TRAIN] * 2)
    assert job.left == [] and job.message is not None and "different calls" in job.message


def test_nobody_leaves_by_the_word_of_one_while_the_others_may_say_something_else() -> None:
    job = Job(4, late=[3])
    job.workers[0].looks(SAVE, SAVE)
    job.workers[3].looks(TRAIN, TRAIN, TRAIN)
    job.workers[1].looks(TRAIN, TRAIN)
    assert job.left == []
    job.workers[2].looks(TRAIN, TRAIN)
    job.workers[3].looks(TRAIN)
    assert job.left == [] and job.message is not None


def test_one_that_the_job_can_not_do_without_does_not_leave() -> None:
    job = Job(3, late=[2])
    job.workers[2].needed = True
    job.workers[0].looks(TRAIN, TRAIN)
    job.workers[1].looks(TRAIN, TRAIN)
    for _ in range(6):
        job.workers[2].looks(SAVE, SAVE)
    assert job.left == [] and job.message is not None
