"""This project's policy (architecture 5 and 6): a fixed grid on however many workers there are, no restarts.

A lost coordinate continues at its shadow's worker, within the running iteration; lost shadows are rebuilt in the
background; at the next iteration boundary coordinates move so that loads are even again and neighbours apart. A loss
of a coordinate with its shadow is recovered from another pipeline; only if there is none is it fatal. Joining workers
take coordinates over at an iteration boundary. What the model assumes for the worse, so as not to promise too much:
a loss restarts the running step from its beginning, for everyone; a handover waits for the state that it moves; the
step waits for its most loaded worker, and pays `hosting_overhead` when workers host several coordinates.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import ClassVar

from ...core.availability import LOOK_AHEAD
from ..clock import MILLISECONDS_PER_SECOND, to_milliseconds
from ..hosting import Hosting
from ..ledger import Ledger, Mode
from ..progress import Progress
from ..scenario import LiveSpec
from ..steptimes import Grid, StepTimes
from .alarms import AlarmedPolicy, Status

__all__ = ["LivePolicy"]


class LivePolicy(AlarmedPolicy):
    """See the module."""

    name: ClassVar[str] = "deepspeed-bamboo"

    def __init__(
        self,
        progress: Progress,
        ledger: Ledger,
        *,
        spec: LiveSpec,
        steps: StepTimes,
        coordinate_bytes: float,
        overhead: float,
        alike: bool = True,
    ) -> None:
        """`steps` are without redundancy, which costs `overhead`; a coordinate's state has `coordinate_bytes`.

        `alike`: a lost coordinate can be copied from another pipeline.
        """
        super().__init__(progress, ledger, spec=spec)
        self._steps = steps
        self._overhead = overhead
        self.redundancy_share = overhead / (1.0 + overhead)
        self._copy_seconds = coordinate_bytes / spec.link_bytes_per_second
        self._grid = Grid(spec.pipelines, spec.stages)
        self._hosting = Hosting(self._grid)
        # Memory for a coordinate and a shadow each; from it the fewest workers that can train.
        self._shadows = spec.redundancy != "off"
        self._alike = alike
        most = max(1, int(spec.state_memory_bytes / (coordinate_bytes * (2.0 if self._shadows else 1.0))))
        self._least_workers = math.ceil(self._grid.size / most)
        self._placed = False
        self._lost: list[str] = []
        # As the engine: without shadows nobody is taken in while the job runs. These wait until all begin again.
        self._aside: dict[str, None] = {}
        # Coordinates whose shadow is being rebuilt, until when; and those that may be beside a neighbour.
        self._unprotected: dict[int, int] = {}
        self._suspects: dict[int, None] = {}
        self._step_seconds: dict[int, float] = {}

    def noticed(self, now: int, node: str) -> None:
        """See Policy: it is emptied at the next boundary."""
        if node in self._hosting:
            self._hosting.drain(node)
            self.wants_step_end = True

    def removed(self, now: int, node: str) -> None:
        """See Policy: all losses of one instant are dealt with together, in `settle`."""
        del self._zones[node]
        self._aside.pop(node, None)
        if node in self._hosting:
            self._lost.append(node)

    def _is_member(self, node: str) -> bool:
        return node in self._hosting or node in self._aside

    def _copied(self) -> None:
        self.wants_step_end = True

    def _register(self, now: int, node: str) -> None:
        if not self._shadows and self._placed and self._status is not Status.WAITING:
            self._aside[node] = None
            self.wants_step_end = True
            return
        self._hosting.join(node, self._zones[node])
        self.wants_step_end = True
        if self._status is Status.WAITING and self._hosting.workers >= self._least_workers:
            seconds = self._spec.handover_seconds if self._placed else self._spec.start_seconds
            self._pause(now, seconds)

    def settle(self, now: int) -> None:
        """See Policy: coordinates of lost workers are taken over."""
        lost_nodes, self._lost = self._lost, []
        if not lost_nodes:
            return
        homes = {coordinate: node for node in lost_nodes for coordinate in self._hosting.hosted(node)}
        for node in lost_nodes:
            self._hosting.leave(node)
        if not homes or not self._placed:
            self.wants_step_end = True
            return
        copied = self._take_over(now, homes)
        if copied is None:
            self._lose_all(now)
            return
        self.progress.stop(now)
        self.ledger.failovers += 1
        for coordinate in homes:
            self._suspects[coordinate] = None
        self._rebuild_shadows(now, homes)
        self._pause(now, self._spec.detect_seconds + self._spec.regroup_seconds + self._moving_seconds(copied))

    def _take_over(self, now: int, homes: dict[int, str]) -> list[int] | None:
        """Give lost coordinates to their shadows' workers, or to others by copying; None if one's state is gone.

        Returns:
            The coordinates that had to be copied from another pipeline.
        """
        hosting = self._hosting
        by_shadow: dict[int, str] = {}
        for coordinate in homes:
            shadow = hosting.host[hosting.predecessor(coordinate)]
            if self._shadows and shadow is not None and self._unprotected.get(coordinate, 0) <= now:
                by_shadow[coordinate] = shadow
        copied = [coordinate for coordinate in homes if coordinate not in by_shadow]
        for coordinate in copied:
            sources = hosting.replicas(coordinate) if self._alike else ()
            if not any(hosting.host[source] is not None or source in by_shadow for source in sources):
                return None
        if not hosting.workers:
            return None
        for coordinate, shadow in by_shadow.items():
            hosting.put(coordinate, shadow)
        for coordinate in copied:
            target = hosting.lightest(coordinate, below=self._grid.size + 1)
            hosting.put(coordinate, target if target is not None else hosting.least_loaded())
        return copied

    def _lose_all(self, now: int) -> None:
        """A fatal loss: all begin again from the last checkpoint."""
        self.ledger.fatal_losses += 1
        self.progress.roll_back(now)
        self._hosting.clear()
        self._begin_anew()
        self._unprotected.clear()
        self._suspects.clear()
        self._pause(now, self._spec.restart_seconds + self._spec.restore_seconds)

    def _begin_anew(self) -> None:
        for node in self._aside:
            self._hosting.join(node, self._zones[node])
        self._aside.clear()
        self._placed = False

    def _starts_again(self, now: int) -> bool:
        """Whether the job is started again, from a checkpoint of this moment, since more are there than take part."""
        workers = self._hosting.workers + len(self._aside)
        usual, most = self._hosting.most_hosted, -(-self._grid.size // max(1, workers))
        seconds = [self._steps.hosted_seconds(self._grid, most_hosted=hosted) for hosted in (usual, most)]
        cost = self._spec.restart_seconds + self._spec.restore_seconds
        ahead_seconds = self._spec.policy_interval_seconds * LOOK_AHEAD
        if not self._aside or (1.0 - seconds[1] / seconds[0]) * ahead_seconds <= cost:
            return False
        self.ledger.reconfigurations += 1
        self.progress.save()
        self.progress.hold()
        self._hosting.clear()
        self._begin_anew()
        self._pause(now, cost)
        return True

    def _rebuild_shadows(self, now: int, changed: Iterable[int]) -> None:
        """Coordinates that changed workers hold no replica of their successor, nor is their own where it should be."""
        if not self._shadows:
            return
        hosting = self._hosting
        affected = dict.fromkeys(changed)
        for coordinate in tuple(affected):
            affected[hosting.successor(coordinate)] = None
        receiving: dict[str | None, int] = {}
        for coordinate in affected:
            holder = hosting.host[hosting.predecessor(coordinate)]
            receiving[holder] = receiving.get(holder, 0) + 1
        seconds = max(receiving.values(), default=0) * self._copy_seconds
        self._copy_until(max(now, self._copying_until) + to_milliseconds(seconds))
        for coordinate in affected:
            self._unprotected[coordinate] = self._copying_until

    def _moving_seconds(self, moved: Iterable[int]) -> float:
        """Until the worker that receives most has it all."""
        received: dict[str | None, int] = {}
        for coordinate in moved:
            node = self._hosting.host[coordinate]
            received[node] = received.get(node, 0) + 1
        return max(received.values(), default=0) * self._copy_seconds

    def _resume(self, now: int) -> None:
        """A pause is over: train, if there are workers enough."""
        hosting = self._hosting
        if hosting.workers < self._least_workers:
            self._status = Status.WAITING
            self.ledger.enter(now, Mode.IDLE)
            return
        if not self._placed:
            hosting.place_all()
            self._placed = True
        self._status = Status.RUNNING
        self.ledger.enter(now, Mode.RUNNING)
        self._start(now)
        self.wants_step_end = True

    def _start(self, now: int) -> None:
        most = self._hosting.most_hosted
        if most not in self._step_seconds:
            factor = (1.0 + self._overhead) * (1.0 + (self._spec.hosting_overhead if most > 1 else 0.0))
            self._step_seconds[most] = self._steps.hosted_seconds(self._grid, most_hosted=most) * factor
        seconds = self._step_seconds[most]
        if now < self._copying_until:
            seconds *= self._spec.copying_slowdown
        self.progress.start(now, max(1, math.ceil(seconds * MILLISECONDS_PER_SECOND)))

    def step_ended(self, now: int) -> None:
        """See Policy: at the boundary loads are evened out, and draining workers emptied."""
        self.wants_step_end = False
        hosting = self._hosting
        if self._starts_again(now):
            return
        moves = hosting.workers and (self._shadows or hosting.drains)
        moved = hosting.rebalance(self._suspects) if moves else []
        self._suspects.clear()
        if now >= self._copying_until:
            self._unprotected.clear()
        if not moved:
            self.progress.hold()
            self._start(now)
            return
        self.ledger.reconfigurations += 1
        self.progress.hold()
        self._pause(now, self._spec.handover_seconds + self._moving_seconds(moved))
        self._rebuild_shadows(now, moved)
