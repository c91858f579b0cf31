"""Which slots of a command are there before its job has its first epoch; all of them are needed to start."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from deepspeed_bamboo.coordination.records import AgentRecord, EpochRecord, Member
from deepspeed_bamboo.core.placement import WorkerId
from deepspeed_bamboo.elastic.decisions import Action, CheckSlots, Say, WakeAfter
from deepspeed_bamboo.elastic.exposure import namesakes, not_survived
from deepspeed_bamboo.elastic.rules import Entry
from deepspeed_bamboo.elastic.slot import Slot
from deepspeed_bamboo.elastic.wording import numbered

MISSING = "slots missing"
GONE = "slots gone"

_FIRST_WORD_SECONDS = 10.0
_NEXT_WORD_SECONDS = 60.0
_SETTLING_SECONDS = 1.0  # the slots of one machine go one after the other


class Gathering:
    """One agent's part in it: checks slots that were there and are gone, and reports those that never came.

    Does nothing after :meth:`end`. The agent with the lowest rank acts for the job.
    """

    def __init__(self, slot: Slot, *, entry: Entry) -> None:
        """Over from the beginning for a slot that joins a job, which has had its first epoch."""
        self._slot = slot
        self._speaks = slot.rank == 0 and entry is Entry.START
        self._over = entry is Entry.JOIN
        self._there = {slot.rank}
        self._gone: dict[int, str] = {}  # -> its node
        self._nodes: dict[int, str] = {}
        self._agents: dict[int, AgentRecord] = {}
        self._asking = False

    @property
    def acts(self) -> bool:
        """Whether this agent is the one that acts, before the first epoch."""
        return not self._over and self._slot.rank == min(self._there)

    def start(self) -> list[Action]:
        """The first thing to do."""
        return [WakeAfter(_FIRST_WORD_SECONDS, MISSING)] if self._speaks else []

    def end(self, epoch: EpochRecord, members: Mapping[WorkerId, Member]) -> list[Action]:
        """The job has an ``epoch``. At its first, one agent says what of the job's machines is to be known."""
        first, self._over = not self._over and epoch.number == 0, True
        if not (first and self._speaks):
            return []
        weak = not_survived(epoch, members)
        return [Say(text) for text in (*namesakes(self._agents), *([] if weak is None else [weak]))]

    def note(self, rank: int, agent: AgentRecord | None) -> list[Action]:
        """The agent of a slot has come, or (None) its key is gone."""
        if agent is not None:
            self._agents[rank] = agent
        if self._over or rank == self._slot.rank or rank >= self._slot.workers:
            return []
        if agent is not None:
            self._there.add(rank)
            self._gone.pop(rank, None)
            self._nodes[rank] = agent.node
            return []
        self._there.discard(rank)
        self._gone[rank] = self._nodes.get(rank, "?")
        return self._ask_soon()

    def woken(self, reason: str) -> list[Action]:
        """The time asked for is over."""
        if self._over:
            return []
        if reason == MISSING:
            return self._tell_missing()
        self._asking = bool(self._gone) and self.acts
        return [CheckSlots(tuple(sorted(self._gone)))] if self._asking else []

    def checked(self, absent: Iterable[int]) -> str | None:
        """What came of a CheckSlots: why the job must end, or None; ask again with :meth:`go_on` then."""
        self._asking = False
        if self._over or not set(absent):
            return None
        self._gone.update({rank: self._nodes.get(rank, "?") for rank in absent})
        nodes = ", ".join(sorted(set(self._gone.values())))
        slots = numbered("slot", sorted(self._gone))
        return (
            f"lost {slots} on {nodes} before training began, and all {self._slot.workers} slots are needed to start; "
            "start the same command again, on every machine"
        )

    def go_on(self) -> list[Action]:
        """After a check that found nobody absent: those whose return was not told of yet are asked after again."""
        return self._ask_soon() if self._gone and not self._over else []

    def _ask_soon(self) -> list[Action]:
        if self._asking:
            return []
        self._asking = True
        return [WakeAfter(_SETTLING_SECONDS, GONE)]

    def _tell_missing(self) -> list[Action]:
        missing = [rank for rank in range(self._slot.workers) if rank not in self._there]
        again = WakeAfter(_NEXT_WORD_SECONDS, MISSING)
        if not missing:
            return [again]  # one may still go, and its machine come back
        text = (
            f"waiting for {len(missing)} of {self._slot.workers} slots: {', '.join(map(str, missing))}; training "
            "starts when all are there. Start the same command on their machines, or end this one with ds_bamboo stop"
        )
        return [Say(text), again]
