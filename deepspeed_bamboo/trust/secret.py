"""The job secret, and the source of it for machines without a common parent. docs/security.md explains it.

A job on one machine makes a secret of its own, and its processes get it from each other through private files and
environments. Several machines have nothing of the kind; they share a *key*, a file of the user's, and the job secret
is made of that key and a salt, which may be public.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

from deepspeed_bamboo.errors import ConfigError
from deepspeed_bamboo.protocol import SECRET_FILE

_SHORTEST = 32
_REMEDY = (
    f"make one with `(umask 077; openssl rand -hex 32 > FILE)`, copy it to every machine, and name it in {SECRET_FILE} "
    "there; or let the machines share a home directory"
)


def new_secret() -> str:
    """A random secret, of a job, or a salt."""
    return secrets.token_hex(32)


def derived(secret: str, *purpose: str) -> str:
    """Another secret, from which ``secret`` can't be found."""
    return hmac.new(secret.encode(), "\0".join(purpose).encode(), hashlib.sha256).hexdigest()


def job_secret(key: str, *, salt: str) -> str:
    """The secret of the job with this public ``salt``, for machines that have the key."""
    return derived(key, "job", salt)


def proof_of(secret: str) -> str:
    """Public: shows whether somebody else's secret is the same."""
    return derived(secret, "proof")


def key_file(environment: Mapping[str, str]) -> Path:
    """Where the key of this user is: BAMBOO_SECRET_FILE, or a file in the home directory."""
    named = environment.get(SECRET_FILE)
    if named:
        return Path(named)
    try:
        home = Path(environment.get("HOME") or "~").expanduser()
    except RuntimeError:  # a container whose user nobody knows
        home = Path("/")
    return home / ".deepspeed_bamboo" / "secret"


def read_key(environment: Mapping[str, str]) -> str | None:
    """The key of this user; None when there is no such file. Raises ConfigError for one that can't be trusted."""
    file = key_file(environment)
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        if environment.get(SECRET_FILE):
            raise ConfigError(f"{SECRET_FILE} is {str(file)!r}, and there is no such file; {_REMEDY}") from None
        return None
    except OSError as error:
        raise ConfigError(f"the secret {file} can't be read ({error.strerror}); {_REMEDY}") from error
    try:
        state = os.fstat(descriptor)
        # Root may have given it to a group, as Kubernetes does for containers that don't run as root.
        closed = not state.st_mode & (0o077 if state.st_uid == os.getuid() else 0o037)
        if not stat.S_ISREG(state.st_mode) or state.st_uid not in (os.getuid(), 0) or not closed:
            raise ConfigError(
                f"the secret {file} must be a file of user {os.getuid()} that nobody else can read, and it has mode "
                f"{stat.S_IMODE(state.st_mode):o} and belongs to user {state.st_uid}; use chmod 600, or another file"
            )
        key = os.read(descriptor, 4096).strip()
    finally:
        os.close(descriptor)
    if len(key) < _SHORTEST:
        raise ConfigError(f"the secret in {file} has {len(key)} characters, and needs {_SHORTEST} at least; {_REMEDY}")
    return hashlib.sha256(key).hexdigest()


def make_key(environment: Mapping[str, str]) -> str:
    """The key of this user, made now if there is none. Raises ConfigError where none can be made, or found."""
    known = read_key(environment)
    if known is not None:
        return known
    file = key_file(environment)
    temporary = file.with_name(f".{file.name}-{secrets.token_hex(8)}")
    try:
        file.parent.mkdir(mode=0o700, exist_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w", encoding="ascii") as stream:  # noqa: PTH123
            stream.write(new_secret() + "\n")
            stream.flush()
            os.fsync(descriptor)
        with contextlib.suppress(FileExistsError):  # another job made it a moment ago
            os.link(temporary, file)
        temporary.unlink()
    except OSError as error:
        raise ConfigError(
            f"the job needs a secret that its machines share, and {file} can't be written ({error.strerror}); {_REMEDY}"
        ) from error
    made = read_key(environment)
    if made is None:
        raise ConfigError(f"the secret {file} has gone; {_REMEDY}")
    return made


def missing_key(environment: Mapping[str, str]) -> str:
    """What to say on a machine where there is no key."""
    return f"this machine has no secret ({key_file(environment)}), which the machines of a job must share: {_REMEDY}"
