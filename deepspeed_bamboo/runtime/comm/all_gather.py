"""All workers contribute a value and get everybody's: nobody sees the result before all have contributed.

This is the agreement of architecture 5 (commit rule): a worker that has seen it knows that every worker had come this
far. Values go up a tree to the first worker of the epoch, and the result comes down again. So no worker talks to more
than FAN_OUT others below it, however many there are, and up to FAN_OUT + 1 workers need one hop each way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from deepspeed_bamboo.core.peers import FAN_OUT, tree_neighbours
from deepspeed_bamboo.core.placement import WorkerId
from deepspeed_bamboo.errors import MessageError
from deepspeed_bamboo.runtime.comm.channel import Message
from deepspeed_bamboo.runtime.comm.encoding import decode, encode
from deepspeed_bamboo.runtime.comm.epoch_monitor import PeerLostError
from deepspeed_bamboo.runtime.comm.peers import Links


def expected_of(me: WorkerId, workers: Sequence[WorkerId]) -> Sequence[WorkerId]:
    """From whom ``me`` gets a message in one agreement among ``workers``."""
    above, below = tree_neighbours(workers, me)
    return below if above is None else (above, *below)


def agree(
    value: Any,
    *,
    links: Links,
    me: WorkerId,
    workers: Sequence[WorkerId],
    label: str,
    fan_out: int = FAN_OUT,
    meanwhile: Callable[[], None] | None = None,
) -> dict[WorkerId, Any]:
    """Return every worker's ``value``. ``workers`` is the same list everywhere; its first one has all first.

    ``meanwhile`` is called once, before the result is known here. A worker with nobody below it in the tree calls it
    after it has contributed.

    Raises PeerLostError or what interrupts the wait; then some workers may have seen the result and others
    not, which recovery settles.
    """
    above, below = tree_neighbours(workers, me, fan_out=fan_out)
    collected = {me: value}
    if meanwhile is not None and (below or above is None):
        meanwhile()
    for worker in below:
        collected.update(_values(links.receive(worker, f"{label}/in").data, sender=worker))
    if above is None:
        result = {worker: collected[worker] for worker in workers}
        packed = encode(result)
    else:
        links.send(above, Message(f"{label}/in", data=encode(collected)))
        if meanwhile is not None and not below:
            meanwhile()
        packed = links.receive(above, f"{label}/out").data
        result = _values(packed, sender=above)
    for worker in below:
        links.send(worker, Message(f"{label}/out", data=packed))
    return result


def _values(packed: Any, *, sender: WorkerId) -> dict[WorkerId, Any]:
    """What ``sender`` has collected. Raises PeerLostError when the message makes no sense."""
    try:
        values = decode(packed) if isinstance(packed, bytes) else None
    except MessageError as error:
        raise PeerLostError(sender, str(error)) from error
    if not isinstance(values, dict):
        raise PeerLostError(sender, "it sent something else where the values of an agreement belong")
    return values
