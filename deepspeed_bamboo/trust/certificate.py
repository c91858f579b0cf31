"""The certificate of one job on several machines: made at its start, signed by nobody, and all that they trust.

Its private key never leaves the process that made it, and is never on a disk. It has no end, for it lives as long as
that process, and machines' clocks differ.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone

from deepspeed_bamboo.errors import MessageError

_BEGINNING = datetime(2000, 1, 1, tzinfo=timezone.utc)
_NO_END = datetime(9999, 12, 31, 23, 59, 59, tzinfo=timezone.utc)  # what RFC 5280 says for "none"


def own_certificate() -> tuple[str, ssl.SSLContext]:
    """A new certificate as PEM, which is public, and what a server needs to encrypt with it."""
    # Only the first agent of a job on several machines needs this package.
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "a job of deepspeed_bamboo")])
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_BEGINNING)
        .not_valid_after(_NO_END)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    certificate = made.public_bytes(Encoding.PEM)
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # each connection proves itself anew
    with _in_memory(certificate + private) as path:
        context.load_cert_chain(path)
    return certificate.decode(), context


def trusting(certificate: str) -> ssl.SSLContext:
    """What a client needs to connect to whoever has the key of this ``certificate`` (PEM), and to nobody else.

    Raises MessageError when it is none.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # it is known itself, so its name doesn't matter
    try:
        context.load_verify_locations(cadata=certificate)
    except (ssl.SSLError, ValueError, TypeError) as error:
        raise MessageError(f"rank 0 gave {certificate[:40]!r} as its certificate, which is none ({error})") from error
    return context


@contextmanager
def _in_memory(content: bytes) -> Iterator[str]:
    """A file name under which this process alone finds ``content``, for libraries that read files only."""
    descriptor = os.memfd_create("bamboo", os.MFD_CLOEXEC)
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(content)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)
