"""What can go wrong between a process and the coordinator.

CoordinationError (BambooError)
├── CoordinatorUnavailable    no answer from the store within the stated time
├── LeaseExpired              the lease of a key no longer exists
├── NoEpoch                   a loss was reported before the job had its first epoch
├── ServerStartError          the job's own etcd did not come up
├── JobNameTaken              a live job already uses this name on these endpoints
└── AnotherRun                the run of the job that this process is of has ended
EndpointError (ConfigError)   the text of an endpoint or of a job name is malformed
"""

# ruff: noqa: N818  -- named for what is the case, as the other parts of the package use them

from __future__ import annotations

from collections.abc import Sequence

from deepspeed_bamboo.errors import BambooError, ConfigError

_FULL = "database space exceeded"  # what etcd says with its alarm NOSPACE
_REFUSALS = (
    "authentication failed",
    "user name is empty",
    "UNAUTHENTICATED",
    "PERMISSION_DENIED",
    "user name not found",
)


# Of gRPC, about a server of something else.
_NO_ETCD = ("UNIMPLEMENTED", "Failed parsing HTTP/2", "Trying to connect an http1.x server", "http2 header with status")


class CoordinationError(BambooError):
    """Base of everything the coordinator can raise while a job runs."""


class CoordinatorUnavailable(CoordinationError):
    """No answer from the store: ``endpoints`` were tried for ``tried_seconds``, the last refusal was ``reason``.

    ``refused``: it answers, and does not let this user in. ``answered``: something answers, so starting it won't help.
    """

    def __init__(self, *, endpoints: Sequence[str], tried_seconds: float, reason: str) -> None:
        self.endpoints = tuple(endpoints)
        self.tried_seconds = tried_seconds
        self.reason = reason
        self.refused = any(refusal in reason for refusal in _REFUSALS)
        self.answered = self.refused or _FULL in reason or is_of_another_server(reason)
        where = f"the coordinator at {', '.join(self.endpoints)}"
        if _FULL in reason:
            text = (
                f"{where} refuses writes, as its database has reached its quota ({reason}); compact and defragment "
                f"etcd, or raise its --quota-backend-bytes, and end the alarm with `etcdctl alarm disarm`"
            )
        elif self.refused:
            text = (
                f"{where} refuses this user ({reason}); check coordinator.username, the password in the variable that "
                "coordinator.password_env names, and what the user's role may read and write"
            )
        elif is_of_another_server(reason):
            text = (
                f"something answers at {', '.join(self.endpoints)} that is no etcd ({reason}); check host and port in "
                "coordinator.endpoints (etcd's own default is 2379), or set it to [] to let the job start its own"
            )
        else:
            text = (
                f"{where} gave no answer within {tried_seconds:.1f} s ({reason}); check that etcd (v3 API) runs there "
                "and that this machine can reach it; if it is only slow, raise coordinator.connect_timeout_seconds; or "
                "set coordinator.endpoints to [] to let the job start its own"
            )
        super().__init__(text)


def is_of_another_server(reason: str) -> bool:
    """Whether this gRPC error comes from something that is no etcd."""
    return any(sign in reason for sign in _NO_ETCD)


class LeaseExpired(CoordinationError):
    """The store has no lease of this number, or no longer."""

    def __init__(self, lease: int) -> None:
        self.lease = lease
        super().__init__(f"lease {lease:x} has expired or was revoked")


class NoEpoch(CoordinationError):
    """The job has no epoch yet, so there is no membership to change."""


class ServerStartError(CoordinationError):
    """The job's own etcd did not come up; the message carries the end of its log."""


class JobNameTaken(CoordinationError):
    """Another live job uses this name under the same prefix of the same store."""


class AnotherRun(CoordinationError):
    """The job ended while this process was cut off, and may have been started anew: its keys are not for this one."""


class EndpointError(ConfigError):
    """An endpoint, job name or worker id does not have the form it must have."""
