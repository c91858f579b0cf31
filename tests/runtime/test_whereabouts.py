"""Who waits in which call, without processes; ``test_user_errors.py`` has the real ones."""

from __future__ import annotations

from deepspeed_bamboo.coordination import JobCoordinator
from deepspeed_bamboo.coordination.memory import MemoryStore
from deepspeed_bamboo.runtime.job.mismatched_calls import Where, Whereabouts


def looking(coordinator: JobCoordinator, worker: str, *places: Where | None) -> None:
    """``worker`` looks once at each of ``places``, where it is then."""
    here: list[Where | None] = [None]
    whereabouts = Whereabouts(coordinator, worker=worker, where=lambda: here[0])
    for place in places:
        here[0] = place
        whereabouts.look()


def verdict(first: list[Where | None], second: list[Where | None]) -> str | None:
    coordinator = JobCoordinator(MemoryStore(), job="job")
    looking(coordinator, "w0", *first)
    looking(coordinator, "w1", *second)
    failure = coordinator.failure()
    return None if failure is None else failure.message


TRAIN, SAVE = Where(0, 3, "train"), Where(0, 3, "save")


def test_different_calls_in_the_same_place_are_a_contradiction() -> None:
    message = verdict([TRAIN, TRAIN], [SAVE, SAVE])
    assert message is not None and "w1: save_checkpoint; w0: train_batch" in message


def test_nothing_is_concluded_from_what_may_be_over_soon_or_is_elsewhere() -> None:
    assert verdict([TRAIN, TRAIN], [SAVE, None, SAVE]) is None
    assert verdict([TRAIN, TRAIN], [TRAIN, TRAIN]) is None
    assert verdict([TRAIN, TRAIN], [SAVE._replace(number=4)] * 2) is None
    assert verdict([TRAIN, TRAIN], [SAVE._replace(epoch=1)] * 2) is None
