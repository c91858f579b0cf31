"""The account of a run: machine time, money, how time was spent. Its size doesn't grow with simulated time."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from .clock import MILLISECONDS_PER_HOUR, NEVER
from .prices import Prices, ZonedPrices
from .series import Series

__all__ = ["Ledger", "Mode", "RunSeries"]


class Mode(enum.IntEnum):
    """What the job is doing."""

    IDLE = 0
    """Too few machines to train."""
    PAUSED = 1
    """Recovering, reconfiguring, restarting, migrating."""
    RUNNING = 2
    """Steps are being computed."""


@dataclass
class RunSeries:
    """What is plotted over time."""

    machines: Series
    dollars: Series
    samples: Series


class Ledger:
    """Machine-hours and dollars of a run, accrued up to `now`.

    Args:
        prices: of one machine.
        series: filled if given; None saves the time.
    """

    def __init__(self, prices: Prices | ZonedPrices, *, series: RunSeries | None = None) -> None:
        self._prices = prices
        self._changes = prices.changes
        self._price_index = 0
        # By what machines of one price have in common: how many there are, and the price of one. And of each machine.
        self._counts: dict[str, int] = {}
        self._now_costs: dict[str, float] = {}
        self._keys: dict[str, str] = {}
        # When the next price begins; the engine stops there, so that a price is constant between its instants.
        self.price_changes_at = self._following_change()
        self.series = series
        self.now = 0
        self.mode = Mode.IDLE
        self.machine_milliseconds = 0
        self.dollars = 0.0
        self.mode_milliseconds = [0, 0, 0]
        self.started: dict[str, int] = {}
        self.additions = 0
        self.preemptions = 0
        self.fatal_losses = 0
        # Of them those after which the survivors went back in their processes.
        self.back_to_memory = 0
        self.back_to_store = 0
        self.reconfigurations = 0
        self.failovers = 0
        self.ended_lifetimes_milliseconds = 0
        # Of running time: what steps take longer than all work shared evenly. Filled by policies that plan their steps.
        self.reducing_milliseconds = 0.0
        self.uneven_milliseconds = 0.0
        self.bubble_milliseconds = 0.0

    @property
    def machines(self) -> int:
        """Machines held and billed now."""
        return len(self.started)

    def _following_change(self) -> int:
        following = self._price_index + 1
        return self._changes[following] if following < len(self._changes) else NEVER

    def accrue(self, now: int) -> None:
        """Bill the time up to `now`, at the current machines, price and mode."""
        elapsed = now - self.now
        if not elapsed:
            return
        machine_milliseconds = elapsed * len(self.started)
        dollars = sum(
            elapsed * count * self._now_costs[key] / MILLISECONDS_PER_HOUR for key, count in self._counts.items()
        )
        self.machine_milliseconds += machine_milliseconds
        self.dollars += dollars
        self.mode_milliseconds[self.mode] += elapsed
        if self.series is not None:
            self.series.machines.spread(self.now, now, machine_milliseconds)
            self.series.dollars.spread(self.now, now, dollars)
        self.now = now

    def change_price(self, now: int) -> None:
        """Begin the next price."""
        self.accrue(now)
        self._price_index += 1
        self._now_costs = {key: self._prices.at(now, key) for key in self._now_costs}
        self.price_changes_at = self._following_change()

    def enter(self, now: int, mode: Mode) -> None:
        """What the job does from `now` on."""
        self.accrue(now)
        self.mode = mode

    def add(self, now: int, node: str, zone: str = "") -> None:
        """A machine is granted, and billed from now on. Raises ScenarioError where its zone has no price."""
        self.accrue(now)
        key = self._keys[node] = self._prices.key(zone)
        if key not in self._counts:
            self._now_costs[key] = self._prices.at(now, key)
        self._counts[key] = self._counts.get(key, 0) + 1
        self.started[node] = now
        self.additions += 1

    def remove(self, now: int, node: str) -> None:
        """A machine is taken."""
        self.accrue(now)
        self._counts[self._keys.pop(node)] -= 1
        self.ended_lifetimes_milliseconds += now - self.started.pop(node)
        self.preemptions += 1

    def lifetimes_milliseconds(self) -> int:
        """Sum over all machines of how long each was held, those still there up to now."""
        return self.ended_lifetimes_milliseconds + sum(self.now - start for start in self.started.values())
