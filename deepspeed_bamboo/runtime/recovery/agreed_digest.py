"""The digest of a job's whole state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from deepspeed_bamboo.core.grid import Grid
from deepspeed_bamboo.runtime.recovery.stage_state import combined_digest, stage_digest
from deepspeed_bamboo.runtime.stock.hosting import StageHost


def agreed_digest(*, host: StageHost, grid: Grid, agree_on: Callable[[str, Callable[[], Any]], Any]) -> str:
    """One sha256 over all parameters and optimizer state in layer order, whatever the placement; collective.

    ``agree_on`` is the engine's. Unlike ``engine.state_digest()`` it is the same on a worker whose script has yet to
    catch up with the job.
    """

    def digests() -> dict[str, str]:
        host.save()
        return {str(replica.coordinate): stage_digest(replica) for replica in host.owners()}

    agreed = agree_on("digest", digests)
    parts = {c: digest for value in agreed.values() for c, digest in value.items()}
    return combined_digest([parts[str(coordinate)] for coordinate in grid])
