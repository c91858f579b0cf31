"""From a loss that an agent has noticed to an epoch that the job agrees on."""

from __future__ import annotations

import errno
import socket
from enum import Enum

from deepspeed_bamboo.coordination import EpochRecord, JobCoordinator, JobFailure, Member, NoEpoch
from deepspeed_bamboo.core.placement import WorkerId
from deepspeed_bamboo.elastic.rules import MAX_RESTARTS

_PROBE_SECONDS = 1.0


def settle_loss(
    coordinator: JobCoordinator, worker: WorkerId, *, reason: str, generation: int, proposer: str
) -> EpochRecord | int | None:
    """Make the job continue without ``worker``, whose process is certainly gone. The caller removes its key.

    Returns the epoch that does. Before the first epoch nothing is trained, so all workers start again, a few times:
    then the generation that they start as. After that, and with a fatal loss, the job ends: then None. Where nobody is
    left who can train, and in a start anew that has lost a worker, it is an epoch in which agents wait.
    Raises CoordinatorUnavailable; then it may be called again.
    """
    while True:
        try:
            epoch = coordinator.propose_loss([worker], reason=f"{worker}: {reason}", proposer=proposer)
            if epoch.roster is not None and epoch.generation == generation:
                coordinator.wait_for_machines(epoch, reason=f"{worker}: {reason}", proposer=proposer)
            return epoch if worker not in epoch.members else None
        except NoEpoch:
            if generation >= MAX_RESTARTS:
                message = (
                    f"worker {worker} was lost before training began ({reason}), as in each of the {MAX_RESTARTS} "
                    f"attempts before; look at its output, and at this machine's memory and devices"
                )
                coordinator.fail(JobFailure(worker=worker, kind="no_start", message=message, traceback=""))
                return None
            if coordinator.advance_generation(expected=generation):
                return generation + 1


class Presence(Enum):
    """The result of a check of another worker's process."""

    GONE = "gone"
    UNKNOWN = "unknown"


def probe(member: Member) -> Presence:
    """Whether the process behind ``member`` is certainly gone.

    Its machine refuses connections to its store's port when nobody listens there any more. Whatever
    else happens (accepted, no answer at all, no route) proves nothing: a stopped process accepts.
    """
    family = socket.AF_INET6 if ":" in member.address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as connection:
        connection.settimeout(_PROBE_SECONDS)
        try:
            code = connection.connect_ex((member.address, member.store_port))
        except OSError:
            return Presence.UNKNOWN
    return Presence.GONE if code == errno.ECONNREFUSED else Presence.UNKNOWN
