"""Finds workers that wait for each other in different calls: a bug of the script that no worker can see alone.

A worker that leaves the loop early while the others train, or a checkpoint that only the first rank saves, would
otherwise hang for ever: nobody is lost.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, NamedTuple

from deepspeed_bamboo.coordination import CoordinatorUnavailable, JobCoordinator, JobFailure
from deepspeed_bamboo.core.placement import WorkerId
from deepspeed_bamboo.runtime.job.session import WorkerSession

# A shorter call is not reported; a longer one costs one write and one read of etcd.
_LOOK_SECONDS = 5.0
_MOST_DOUBTS = 5
_OF_ONE_THAT_LEAVES = (
    "{text}. This worker came late and differs from the others, so it alone leaves, and they continue. Have the script "
    "decide by what is the same on all workers (engine.global_steps, what train_batch returns), not by its own clock"
)

_CALLS = {
    "train": "train_batch",
    "settle": "train_batch",
    "data": "train_batch",
    "evaluation position": "eval_batch",
    "evaluate": "eval_batch",
    "save": "save_checkpoint",
    "latest": "save_checkpoint",
    "left": "load_checkpoint",
    "checkpoints there": "load_checkpoint",
    "checkpoint checked": "load_checkpoint",
    "structure": "load_checkpoint or refresh_shadows",
    "load": "load_checkpoint",
    "refresh": "refresh_shadows",
    "digest": "state_digest",
    "barrier": "barrier",
    "whole state": "whole_state_dict",
    "user collective": "a collective of torch.distributed, with which save_checkpoint begins, too",
    "close": "at the end of the script",
}

MESSAGE = "message"
"""The kind of no activity: what a worker waits for that is before the next one, from some of the others."""

logger = logging.getLogger(__name__)


class Where(NamedTuple):
    """A worker's activity: its kind, and its number in the epoch, which is the same on all workers.

    ``awaited``, where it waits before that activity: by worker what that one has yet to send.
    """

    epoch: int
    number: int
    kind: str
    awaited: tuple[tuple[WorkerId, str], ...] = ()


class Verdict(NamedTuple):
    """Workers wait in different calls; ``text`` names them.

    ``leaving``: the ones that came late and differ from the others; they alone have to go. ``unclear``: whether it is
    so shows once others wait somewhere, too.
    """

    text: str
    leaving: tuple[WorkerId, ...] = ()
    unclear: bool = False


class Whereabouts:
    """Looks, now and then and in a thread of its own, at where this worker has been for long, and where the others are.

    The later of two workers that wait in different calls finds the earlier one's word, and ends the job with it. Where
    only workers that came late differ from the others, these leave, and the job continues.
    """

    def __init__(
        self,
        coordinator: JobCoordinator,
        *,
        worker: WorkerId,
        where: Callable[[], Where | None],
        members: Callable[[], Sequence[WorkerId]],
        leave: Callable[[str], bool],
    ) -> None:
        """``where`` says in which activity this worker is; None outside of any. ``members`` are those of the epoch.

        ``leave`` has this worker leave for the reason given, unless the job can't do without it: then False.
        """
        self._coordinator = coordinator
        self._worker = worker
        self._where = where
        self._members = members
        self._leave = leave
        self._before: Where | None = None
        self._told: Where | None = None
        self._looks_again = False  # others may come to another call only later
        self._doubts = 0  # looks at which workers were found to differ here
        self._left = False
        self._closed = threading.Event()

    def start(self) -> None:
        """Look every few seconds from now on."""
        threading.Thread(target=self._run, name="bamboo-whereabouts", daemon=True).start()

    def close(self) -> None:
        """Look no more. Does not wait."""
        self._closed.set()

    def look(self) -> None:
        """Tell where this worker is if it was there at the last look, too, and compare that with what others told."""
        here = self._where()
        before, self._before = self._before, here
        if here is None or here != before:
            self._looks_again, self._doubts = False, 0
            return
        try:
            if here != self._told:
                self._coordinator.publish_whereabouts(self._worker, here._asdict())
                self._told = here
            elif not self._looks_again:
                return
            self._compare(here)
        except CoordinatorUnavailable as error:
            self._told = None
            logger.info("whereabouts not compared: %s", error)

    def _compare(self, here: Where) -> None:
        others = self._coordinator.whereabouts()
        late = {worker for worker, member in self._coordinator.members().items() if member.joining}
        told = {**others, self._worker: here._asdict()}
        verdict = judged(here, told, me=self._worker, members=self._members(), late=late)
        # The others leave the word to one that came late, which may have been here before them.
        self._looks_again = verdict is not None or self._worker in late or here.kind == MESSAGE
        self._doubts += verdict is not None
        if verdict is None or self._where() != here:
            return
        sure = self._doubts >= _MOST_DOUBTS
        if self._worker in verdict.leaving and not self._left and (sure or not verdict.unclear):
            self._left = self._leave(_OF_ONE_THAT_LEAVES.format(text=verdict.text))
        if not self._left and (sure or not (verdict.leaving or verdict.unclear)):
            self._coordinator.fail(JobFailure(self._worker, "user_error", verdict.text, verdict.text))

    def _run(self) -> None:
        while not self._closed.wait(_LOOK_SECONDS):
            self.look()


def judged(
    here: Where,
    told: Mapping[WorkerId, Mapping[str, Any]],
    *,
    me: WorkerId,
    members: Sequence[WorkerId],
    late: Container[WorkerId],
) -> Verdict | None:
    """What to conclude when workers are in other calls than ``here`` in the same place of the job; None: nothing.

    ``told``: where workers are; ``late``: those that came to the running job. The majority never has to leave, and
    nobody who was there at the start.
    """
    if here.kind == MESSAGE:
        return _of_message(here, told, me=me, late=late)
    by_kind: dict[str, list[WorkerId]] = defaultdict(list)
    for worker, place in sorted(told.items()):
        if (place["epoch"], place["number"]) == (here.epoch, here.number) and place["kind"] != MESSAGE:
            by_kind[place["kind"]].append(worker)
    if len(by_kind) < 2:
        return None
    parties = [f"{', '.join(workers)}: {_CALLS.get(kind, kind)}" for kind, workers in sorted(by_kind.items())]
    text = (
        f"the workers wait for each other in different calls ({'; '.join(parties)}); every rank must make the same "
        "calls in the same order, so look for one that is made, or left out, on some ranks only"
    )
    others = {kind: [w for k, its in by_kind.items() if k != kind for w in its] for kind in by_kind}
    fitting = [kind for kind in sorted(by_kind) if all(worker in late for worker in others[kind])]
    silent = set(members) - {worker for its in by_kind.values() for worker in its}
    right = next((kind for kind in fitting if 2 * len(by_kind[kind]) > len(members)), None)
    if right is None and not silent and len(fitting) == 1 and 2 * len(others[fitting[0]]) <= len(members):
        right = fitting[0]
    if right is None:
        return Verdict(text, unclear=bool(fitting and silent))
    return Verdict(text, leaving=tuple(others[right]))


def _of_message(
    here: Where, told: Mapping[WorkerId, Mapping[str, Any]], *, me: WorkerId, late: Container[WorkerId]
) -> Verdict | None:
    """``me`` waits for what others have not sent. One that is in the next activity waits there for ``me``.

    Only the one that waits for a message can tell: what it has told may be over.
    """
    for sender, _ in here.awaited:
        place = told.get(sender)
        if place is None or place["kind"] == MESSAGE or (place["epoch"], place["number"]) != here[:2]:
            continue
        call = _CALLS.get(place["kind"], place["kind"])
        text = (
            f"{me} waits for a message from {sender}, or for its part in a group's collective, and {sender} waits for "
            f"{me}: {call}. So one rank receives more than the other sends, or calls what the other does not. After a "
            "loss a script that reads data where it hosts the first or last stage begins to read on another worker: "
            "where ranks send each other data, have all ranks read from the first step on"
        )
        return Verdict(text, leaving=(me,) if me in late else (), unclear=True)  # a large one may be on its way
    return None


def whereabouts_of(session: WorkerSession, *, where: Callable[[], Where | None]) -> Whereabouts:
    """Those of the worker of ``session``."""
    coordinator, interruption, me = session.coordinator, session.interruption, session.worker

    def members() -> Sequence[WorkerId]:
        return () if interruption.active is None else interruption.active.members

    def leave(why: str) -> bool:
        record = interruption.active
        if record is None or record.placement.without([me])[0] is None:
            return False
        reason = f"{me}: its script makes other calls than the others"
        if me in coordinator.propose_loss([me], reason=reason, proposer=me, unless_fatal=True).members:
            return False
        interruption.announce_expulsion(why)
        return True

    return Whereabouts(coordinator, worker=me, where=where, members=members, leave=leave)
