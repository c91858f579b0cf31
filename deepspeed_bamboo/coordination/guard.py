"""How an etcd that is not open to everybody is reached: encrypted, with a certificate, with a password.

The password itself is never written anywhere: what travels is the name of the environment variable
that holds it, on every machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from deepspeed_bamboo.coordination.errors import EndpointError
from deepspeed_bamboo.protocol import ETCD_PREFIX


@dataclass(frozen=True)
class EtcdGuard:
    """The settings coordinator.username, password_env, ca_cert, cert and key; None for what there is not.

    ``ca_cert`` makes connections encrypted.
    """

    username: str | None = None
    password_env: str | None = None
    ca_cert: str | None = None
    cert: str | None = None
    key: str | None = None

    @classmethod
    def of(cls, settings: object) -> EtcdGuard:
        """From the "coordinator" part of the configuration, which has attributes of the same names."""
        return cls(**{field.name: getattr(settings, field.name) for field in fields(cls)})

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> EtcdGuard:
        """What :meth:`to_environment` wrote."""
        return cls(**{field.name: environment.get(_variable(field.name)) or None for field in fields(cls)})

    def to_environment(self) -> dict[str, str]:
        """As variables for another process, which may run in another folder. Holds no secret."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        for name in ("ca_cert", "cert", "key"):
            values[name] = values[name] and str(Path(values[name]).absolute())
        return {_variable(name): value for name, value in values.items() if value}

    def files(self) -> tuple[bytes | None, bytes | None, bytes | None]:
        """The content of ca_cert, key and cert. Raises EndpointError that names a file which can't be read."""
        return self._read("ca_cert"), self._read("key"), self._read("cert")

    def password(self, environment: Mapping[str, str]) -> str:
        """The password. Raises EndpointError when its variable is not set."""
        name = self.password_env or ""
        if not environment.get(name):
            raise EndpointError(
                f"coordinator.password_env is {name!r}, but the environment has no such variable; "
                f"set it to the password of etcd's user {self.username!r} on every machine"
            )
        return environment[name]

    def check(self, environment: Mapping[str, str]) -> None:
        """Raises EndpointError for what can be seen to be wrong before anybody is connected."""
        self.files()
        if self.username is not None:
            self.password(environment)

    def _read(self, name: str) -> bytes | None:
        path = getattr(self, name)
        if path is None:
            return None
        try:
            content = Path(path).read_bytes()
        except OSError as error:
            raise EndpointError(
                f"coordinator.{name} is {path!r}, which can't be read ({error.strerror}); name a PEM file"
            ) from error
        if b"-----BEGIN " not in content:
            raise EndpointError(f"coordinator.{name} is {path!r}, which is no PEM file; it begins with -----BEGIN")
        return content


def _variable(name: str) -> str:
    return ETCD_PREFIX + name.upper()
