"""Whether to repeat a command that has ended, judged by its slots' notes and by its own end."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from deepspeed_bamboo.elastic.decisions import signal_name
from deepspeed_bamboo.elastic.outcome import BEGUN, FINISHED, LEFT, NOT_YET, PLAIN, REFUSED, SlotNote
from deepspeed_bamboo.protocol import EXIT_TRY_AGAIN, EXIT_USER_ERROR

# Nothing that another start would mend.
_SCRIPTS_FAULT = ("user_error", "no_start", REFUSED)
_MACHINES_WANTING = ("fatal_loss", "slots_lost", "no_coordinator", "no_machines", "hang", NOT_YET)
_MOST_DOUBLINGS = 60  # 2.0 ** 1024 is no number any more
_LAUNCHER_LOST = 128 + signal.SIGHUP  # what agents end with whose launcher is gone


@dataclass(frozen=True)
class Verdict:
    """``code``: the exit code of ``ds_bamboo run`` if this is the last run. ``reason`` is for people."""

    kind: Literal["done", "again", "give up"]
    code: int
    reason: str


def judge(command_code: int, notes: Sequence[SlotNote], *, signalled: int | None = None) -> Verdict:
    """What to do after a command that ended with ``command_code``, negative for a signal.

    ``signalled``: what ended ``ds_bamboo run`` itself.
    """
    said = {note.how: note for note in sorted(notes, key=lambda note: bool(note.message))}
    if signalled is not None:
        return Verdict("give up", 128 + signalled, f"{signal_name(signalled)} was sent to ds_bamboo run")
    for how in _SCRIPTS_FAULT:
        if how in said:
            code = said[how].code or EXIT_USER_ERROR
            return Verdict("give up", code, said[how].message or "its script, or its start, failed; see its output")
    if FINISHED in said:
        return Verdict("done", 0, said[FINISHED].message or "the job is complete")
    for how in _MACHINES_WANTING:
        if how in said:
            return Verdict("again", EXIT_TRY_AGAIN, said[how].message or how.replace("_", " "))
    if BEGUN in said:
        return Verdict("again", EXIT_TRY_AGAIN, "a slot's agent was killed")
    if any(note.code == _LAUNCHER_LOST for note in notes):
        return Verdict("again", EXIT_TRY_AGAIN, "its launcher was killed")
    if "interrupted" in said and all(note.code == 1 for note in notes):
        return Verdict(
            "again", EXIT_TRY_AGAIN, f"the job was interrupted on another machine: {said['interrupted'].message}"
        )
    if LEFT in said and said[LEFT].code == 0:
        return Verdict("done", 0, "this machine has left the job, which continues without it")
    if notes and PLAIN not in said:
        last = max(notes, key=lambda note: note.code)
        return Verdict("give up", last.code or 1, last.message or "it was interrupted")
    return _of_a_plain_command(command_code)


def _of_a_plain_command(code: int) -> Verdict:
    """No slot of it runs under the plugin, so all there is to go by is its exit code."""
    if code == 0:
        return Verdict("done", 0, "the command has ended with exit code 0")
    if code == EXIT_TRY_AGAIN:
        return Verdict("again", EXIT_TRY_AGAIN, f"the command has ended with exit code {code}")
    if code < 0:
        return Verdict("again", EXIT_TRY_AGAIN, f"the command was killed by {signal_name(-code)}")
    return Verdict("give up", code, f"the command has ended with exit code {code}")


@dataclass
class Patience:
    """How often a command is repeated, and after what pause: longer and longer while it makes no progress."""

    pause_seconds: float = 10.0
    longest_pause_seconds: float = 300.0
    fruitless_limit: int = 5
    fruitless: int = 0
    best_step: int = -1

    def next_pause_seconds(self, notes: Sequence[SlotNote]) -> float | None:
        """After a run with these ``notes``; None to give up: so many runs in a row made no progress."""
        step = max((note.step for note in notes), default=-1)
        self.fruitless = 0 if step > self.best_step else self.fruitless + 1
        self.best_step = max(self.best_step, step)
        if self.fruitless >= self.fruitless_limit:
            return None
        return min(
            self.pause_seconds * 2.0 ** min(max(0, self.fruitless - 1), _MOST_DOUBLINGS), self.longest_pause_seconds
        )
