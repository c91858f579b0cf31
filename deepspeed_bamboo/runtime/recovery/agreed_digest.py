"""The digest of a job's whole state."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepspeed_bamboo.runtime.recovery.stage_state import combined_digest, stage_digest

if TYPE_CHECKING:
    from deepspeed_bamboo.runtime.engine import BambooPipelineEngine


def agreed_digest(engine: BambooPipelineEngine) -> str:
    """One sha256 over all parameters and optimizer state in layer order, whatever the placement; collective.

    Wherever the script of a worker is: ``engine.state_digest()`` is empty on one that has yet to catch up.
    """

    def digests() -> dict[str, str]:
        engine.host.save()
        return {str(replica.coordinate): stage_digest(replica) for replica in engine.host.owners()}

    agreed = engine.agree_on("digest", digests)
    parts = {c: digest for value in agreed.values() for c, digest in value.items()}
    return combined_digest([parts[str(coordinate)] for coordinate in engine.job_grid])
