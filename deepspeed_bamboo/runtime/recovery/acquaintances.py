"""The workers to which this one may have to connect after a loss, looked up before the loss comes."""

from __future__ import annotations

from collections.abc import Sequence

from deepspeed_bamboo.core.peers import peers_after_a_loss
from deepspeed_bamboo.core.placement import Placement, WorkerId
from deepspeed_bamboo.runtime.comm.peers import Links


class Acquaintances:
    """Of worker ``me``: connections to the stores of others, authenticated beside training.

    What is left for a loss is one question and one pass word for each peer.
    """

    def __init__(self, links: Links, *, me: WorkerId) -> None:
        self._links, self._me = links, me
        self._known: tuple[Placement, tuple[WorkerId, ...]] | None = None

    def keep(self, placement: Placement, *, members: Sequence[WorkerId]) -> None:
        """At an iteration boundary; of no cost where nothing has changed, and never waits."""
        now = (placement, tuple(members))
        if now != self._known:
            self._known = now
            self._links.acquaint(lambda: peers_after_a_loss(placement, self._me, members=now[1]))
