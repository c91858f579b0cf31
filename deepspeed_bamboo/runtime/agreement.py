"""All workers hand in a value and get everybody's: nobody sees the result before all have handed in.

That is the agreement of DESIGN 5 (commit rule): whoever has seen it knows that every worker had come this
far. It goes through the first worker of the epoch: one hop in, one hop out.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

from deepspeed_bamboo.core.placement import WorkerId
from deepspeed_bamboo.runtime.channel import Message
from deepspeed_bamboo.runtime.links import Links


def agree(value: Any, *, links: Links, me: WorkerId, workers: Sequence[WorkerId], label: str) -> dict[WorkerId, Any]:
    """Return every worker's ``value``. ``workers`` is the same list everywhere; its first one collects.

    Raises PeerLostError or what interrupts the wait; then some workers may have seen the result and others
    not, which recovery settles.
    """
    root = workers[0]
    if me != root:
        links.send(root, Message(f"{label}/in", data=value))
        result: dict[WorkerId, Any] = pickle.loads(links.receive(root, f"{label}/out").data)
        return result
    values = {me: value}
    for worker in workers[1:]:
        values[worker] = links.receive(worker, f"{label}/in").data
    packed = pickle.dumps(values)  # once, since it grows with the number of workers, as does that of the messages
    for worker in workers[1:]:
        links.send(worker, Message(f"{label}/out", data=packed))
    return values
