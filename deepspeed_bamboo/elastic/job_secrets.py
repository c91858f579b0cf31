"""The secret of a job at its start, and how a joining command finds it."""

from __future__ import annotations

from collections.abc import Mapping

from deepspeed_bamboo.coordination import JobCoordinator
from deepspeed_bamboo.elastic.errors import LaunchError
from deepspeed_bamboo.errors import ConfigError
from deepspeed_bamboo.trust.secret import job_secret, key_file, make_key, missing_key, new_secret, proof_of, read_key


def secret_to_start(environment: Mapping[str, str], *, alone: bool, joinable: bool) -> tuple[str, str]:
    """The secret of a new job, and the salt with which others make it of the key; empty where no other may come.

    ``alone``: all slots are on this machine. ``joinable``: others could join at the user's etcd. Raises ConfigError
    where several machines need a key and this one has none, nor a place for one.
    """
    if alone and not joinable:
        return new_secret(), ""
    try:
        key = make_key(environment)
    except ConfigError:
        if alone:
            return new_secret(), ""  # as good as any; other machines can't join then, and are told why
        raise
    salt = new_secret()
    return job_secret(key, salt=salt), salt


def secret_to_join(coordinator: JobCoordinator, environment: Mapping[str, str]) -> tuple[str, str]:
    """The secret of a running job, and its salt. Raises LaunchError where this machine can't have it."""
    salt, proof = coordinator.salt_and_proof()
    if not salt:
        raise LaunchError(
            f"job {coordinator.job!r} can't be joined: where it was started no file for a secret could be made, or "
            "its etcd has lost its data. Start it again to let others join"
        )
    key = read_key(environment)
    if key is None:
        raise LaunchError(missing_key(environment))
    secret = job_secret(key, salt=salt)
    if proof_of(secret) != proof:
        raise LaunchError(
            f"the secret of this machine ({key_file(environment)}) is not the one that job {coordinator.job!r} was "
            "started with; copy the file from the machine where it was started, see docs/security.md"
        )
    return secret, salt
