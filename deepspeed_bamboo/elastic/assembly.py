"""Which slots start anew, while a job waits for machines because nobody is left who can train."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from deepspeed_bamboo.coordination import EpochRecord, Roster
from deepspeed_bamboo.elastic.rules import Rules

MACHINES = "no machines came in epoch "
EVERYBODY = "who comes at once is there in epoch "


@dataclass(frozen=True)
class Offer:
    """A slot that could start a worker: workers may meet at ``port`` of ``address``, its machine.

    ``reached``: how many steps its workers so far have seen complete.
    """

    slot: int
    address: str
    port: int
    reached: int

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Offer:
        """Raises ValueError, KeyError or TypeError for what is no offer."""
        slot, port, reached, address = (value[name] for name in ("slot", "port", "reached", "address"))
        if not all(isinstance(number, int) for number in (slot, port, reached)) or not isinstance(address, str):
            raise ValueError(f"{value} is no offer of a slot")
        return cls(slot, address, port, reached)


@dataclass(frozen=True)
class Seat:
    """Where a worker starts anew: it is number ``index`` of ``workers``, which meet at ``port`` of ``address``.

    ``pipelines`` and ``reached`` (steps complete): of the job so far.
    """

    index: int
    workers: int
    address: str
    port: int
    pipelines: int
    reached: int


def assemble(
    epoch: EpochRecord, offers: Mapping[int, Offer], agents: Collection[int], *, all_had_time: bool
) -> Roster | None:
    """Who starts anew after ``epoch``, in which ``agents`` wait: those that have made ``offers``; None: not yet.

    All agents that are there are waited for until they have had the time to offer their slots. There are never more
    workers than coordinates; further ones join the job when it trains.
    """
    there = sorted(slot for slot in offers if slot in agents)
    if not there or not (all_had_time or set(agents) <= set(there)):
        return None
    slots = tuple(there[: len(epoch.placement.grid)])
    first = offers[slots[0]]
    reached = max(offers[slot].reached for slot in there)
    return Roster(slots, epoch.generation + 1, first.address, first.port, max(0, reached))


def seat_of(epoch: EpochRecord, slot: int) -> Seat | None:
    """The seat of ``slot`` among those that start anew in ``epoch``; None where it is not one of them."""
    roster = epoch.roster
    if roster is None or slot not in roster.slots:
        return None
    return Seat(
        index=roster.slots.index(slot),
        workers=len(roster.slots),
        address=roster.address,
        port=roster.port,
        pipelines=epoch.placement.grid.pipelines,
        reached=roster.reached,
    )


def seconds_to_offer(rules: Rules, *, lease_seconds: float) -> float:
    """How long to wait for slots that are about to offer themselves, or are gone and not yet known to be.

    A slot that has replaced a worker before takes twice as long as one that has not.
    """
    return lease_seconds + 2.0 * rules.restart_seconds


class Assembly:
    """One agent's view of it: which agents there are, and which of them offer their slots in the current epoch."""

    def __init__(self) -> None:
        self._agents: set[int] = set()
        self._offers: dict[int, Offer] = {}
        self._number = -1
        self._all_had_time = False
        self.offered = False  # the own slot

    def note_agent(self, slot: int, *, there: bool) -> None:
        """The agent of a slot has come or gone."""
        (self._agents.add if there else self._agents.discard)(slot)

    def begin(self, epoch: EpochRecord) -> None:
        """Agents wait from now on, in ``epoch``."""
        self._number, self._offers, self._all_had_time, self.offered = epoch.number, {}, False, False

    def note_offer(self, number: int, value: Mapping[str, Any]) -> None:
        """Somebody has published an offer in epoch ``number``. What is none, or of another epoch, is left out."""
        try:
            offer = Offer.from_json(value)
        except (ValueError, KeyError, TypeError):
            return
        if number == self._number:
            self._offers[offer.slot] = offer

    def note_time(self, reason: str) -> None:
        """A WakeAfter of :data:`EVERYBODY` is over."""
        self._all_had_time = self._all_had_time or reason == f"{EVERYBODY}{self._number}"

    def roster(self, epoch: EpochRecord) -> Roster | None:
        """Who starts now; see :func:`assemble`."""
        return assemble(epoch, self._offers, self._agents, all_had_time=self._all_had_time)

    def gone(self, roster: Roster) -> tuple[int, ...]:
        """The slots of ``roster`` whose agents are not there."""
        return tuple(slot for slot in roster.slots if slot not in self._agents)
