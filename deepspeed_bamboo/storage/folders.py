"""Where checkpoints are kept: a directory that all machines see, or a prefix in an S3 bucket (``storage/s3.py``)."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import BinaryIO, Protocol

from deepspeed_bamboo.errors import CheckpointError

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_HALF_A_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+-]*:/|s3:")  # as in s3:/bucket, which would be a folder called s3:
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_PART = ".part"
_CHUNK_BYTES = 4 * 2**20

Fill = Callable[[BinaryIO], object]
"""Writes the content of a file into it."""


OnBytes = Callable[[int], object]
"""Called with the number of bytes that were read."""


def ignore_bytes(size: int) -> None:
    """Counts nothing."""


class Folder(Protocol):
    """Named files, some of them in folders one level down. Every method raises CheckpointError when it can't do it."""

    def read_text(self, name: str) -> str | None:
        """What the file says; None where there is none. Bytes that are no UTF-8 become replacement characters."""

    def write(self, name: str, fill: Fill) -> None:
        """Make the file, or replace it atomically: nobody ever sees a part of it. ``name`` may be ``folder/file``.

        Exceptions that ``fill`` raises are passed on, and the file stays as it was.
        """

    def folders(self) -> list[str]:
        """The folders in it, in alphabetical order."""

    def sizes(self, folder: str) -> dict[str, int]:
        """The files of ``folder``, and how many bytes each has; none where there is no such folder."""

    def chunks(self, name: str) -> Iterator[bytes]:
        """The content of the file ``folder/file``, piece by piece."""

    def remove(self, folder: str) -> None:
        """Remove ``folder`` with all that is in it."""

    def remove_file(self, name: str) -> None:
        """Remove the file ``folder/file``."""

    def local(self, folder: str, *, on_bytes: OnBytes = ignore_bytes) -> AbstractContextManager[Path]:
        """Inside the block: a directory of this machine in which ``folder`` is, with all that is in it.

        ``on_bytes`` counts what is copied for that.
        """


def location_problem(location: str) -> str | None:
    """What is wrong with ``location`` as the name of a folder, in words that follow it; None: nothing."""
    found = _SCHEME.fullmatch(location)
    if found is None and _HALF_A_SCHEME.match(location):
        scheme = location.partition(":")[0]
        return f"begins with {scheme}: and names no folder; write s3://bucket/prefix, or ./{location} for that folder"
    if found is None:
        return None
    scheme, rest = found.groups()
    if scheme != "s3":
        return f"begins with {scheme}://; give a directory that all machines see, or s3://bucket/prefix"
    if not _BUCKET.fullmatch(rest.partition("/")[0]):
        return "names no bucket (3 to 63 small letters, digits, '.' or '-'); write s3://bucket/prefix"
    return None


def open_folder(location: str) -> Folder:
    """The folder that ``location`` names; nothing is looked at yet. Raises CheckpointError without boto3 for S3."""
    if not location.startswith("s3://"):
        return LocalFolder(Path(location))
    from deepspeed_bamboo.storage.s3 import S3Folder

    bucket, _, prefix = location.removeprefix("s3://").partition("/")
    return S3Folder(bucket, prefix.strip("/"))


class LocalFolder:
    """A directory, made when something is written."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __str__(self) -> str:
        return str(self._path)

    def read_text(self, name: str) -> str | None:
        """See :class:`Folder`."""
        with self._explained("read"):
            try:
                return (self._path / name).read_text(encoding="utf-8", errors="replace")
            except FileNotFoundError:
                return None

    def write(self, name: str, fill: Fill) -> None:
        """See :class:`Folder`. On disk, not only on its way there, when this returns."""
        path = self._path / name
        part = path.with_name(f"{path.name}.{os.getpid()}{_PART}")
        with self._explained("written"):
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                with part.open("wb") as file:
                    fill(file)
                    file.flush()
                    os.fsync(file.fileno())
                part.replace(path)
            finally:
                part.unlink(missing_ok=True)

    def folders(self) -> list[str]:
        """See :class:`Folder`."""
        with self._explained("listed"):
            if not self._path.is_dir():
                return []
            return sorted(path.name for path in self._path.iterdir() if path.is_dir())

    def sizes(self, folder: str) -> dict[str, int]:
        """See :class:`Folder`."""
        with self._explained("listed"):
            path = self._path / folder
            if not path.is_dir():
                return {}
            return {file.name: file.stat().st_size for file in path.iterdir() if file.is_file()}

    def chunks(self, name: str) -> Iterator[bytes]:
        """See :class:`Folder`."""
        with self._explained("read"), (self._path / name).open("rb") as file:
            while data := file.read(_CHUNK_BYTES):
                yield data

    def remove(self, folder: str) -> None:
        """See :class:`Folder`."""
        with self._explained("cleared"):
            shutil.rmtree(self._path / folder)

    def remove_file(self, name: str) -> None:
        """See :class:`Folder`."""
        with self._explained("cleared"):
            (self._path / name).unlink()

    @contextmanager
    def local(self, folder: str, *, on_bytes: OnBytes = ignore_bytes) -> Iterator[Path]:
        """See :class:`Folder`: the directory itself."""
        yield self._path

    @contextmanager
    def _explained(self, action: str) -> Iterator[None]:
        try:
            yield
        except (OSError, UnicodeError) as error:
            raise CheckpointError(
                f"{str(self._path)!r} can't be {action} ({error}); check that it exists and has room, and "
                "that this user may use it"
            ) from error
