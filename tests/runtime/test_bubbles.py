"""Redundant forwards go where a bubble was measured to be long enough, and nowhere else."""

from __future__ import annotations

from dataclasses import dataclass

from deepspeed_bamboo.runtime.iteration.bubbles import Bubbles


@dataclass
class Mark:
    """As a CUDA event that keeps time."""

    milliseconds: float
    passed: bool = True

    def query(self) -> bool:
        return self.passed

    def elapsed_time(self, other: Mark) -> float:
        return other.milliseconds - self.milliseconds


class Device:
    """A worker whose one bubble takes ``bubble`` milliseconds without a forward, which takes ``forward``."""

    def __init__(self, *, bubble: float, forward: float) -> None:
        self.now = 0.0
        self.bubble, self.forward = bubble, forward
        self.waits = True
        self.behind = False
        self.bubbles = Bubbles(lambda: Mark(self.now, passed=not self.behind))

    def iteration(self, program: int = 0) -> bool:
        """Whether the forward was done."""
        arrival = self.now + self.bubble
        did = self.bubbles.fits("here", program=program)
        if did:
            self.now += self.forward
            self.bubbles.done()
        self.now = max(self.now, arrival)
        if self.waits:
            self.bubbles.arrives(Mark(self.now, passed=not self.behind))
        self.bubbles.ends()
        return did


def test_a_bubble_is_measured_first_and_then_filled() -> None:
    device = Device(bubble=5.0, forward=4.0)
    assert [device.iteration() for _ in range(64)] == [False] + [True] * 63
    assert [device.iteration() for _ in range(64)] == [False] + [True] * 63, "measured again"


def test_one_that_is_too_short_is_left_alone_but_for_one_try() -> None:
    device = Device(bubble=2.0, forward=4.0)
    assert [device.iteration() for _ in range(1024)] == [False, True] + [False] * 1022
    device.forward = 1.0
    assert [device.iteration() for _ in range(4)] == [False, True, True, True], "the forward is measured again, too"


def test_what_becomes_too_short_is_noticed() -> None:
    device = Device(bubble=5.0, forward=4.0)
    for _ in range(60):
        device.iteration()
    device.bubble = 3.0
    assert sum(device.iteration() for _ in range(200)) == 4


def test_another_program_is_measured_anew() -> None:
    device = Device(bubble=5.0, forward=4.0)
    assert [device.iteration(program) for program in (0, 0, 1, 1, 0)] == [False, True, False, True, False]


def test_where_nothing_is_waited_for_the_plan_is_believed() -> None:
    device = Device(bubble=0.0, forward=4.0)
    device.waits = False
    assert [device.iteration() for _ in range(5)] == [False, True, True, True, True]


def test_what_the_device_has_not_passed_is_no_measurement() -> None:
    device = Device(bubble=5.0, forward=4.0)
    device.behind = True
    assert [device.iteration() for _ in range(5)] == [False] * 5


def test_without_a_clock_the_plan_is_believed() -> None:
    bubbles = Bubbles(None)
    assert bubbles.fits("here", program=0) and bubbles.fits("here", program=0)
