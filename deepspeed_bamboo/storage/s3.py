"""A prefix in an S3 bucket as a folder for checkpoints. Needs boto3 only when used.

Region, credentials and the endpoint (AWS_ENDPOINT_URL_S3, for services that speak S3's language) are found as boto3
finds them.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from deepspeed_bamboo.errors import CheckpointError
from deepspeed_bamboo.storage.folders import Fill, OnBytes, ignore_bytes

_CHUNK_BYTES = 4 * 2**20


class S3Folder:
    """See :class:`deepspeed_bamboo.storage.folders.Folder`. Objects appear whole, so nothing has to be renamed."""

    def __init__(self, bucket: str, prefix: str) -> None:
        """Raises CheckpointError when boto3 is missing or knows no region."""
        self._name = f"s3://{bucket}/{prefix}".rstrip("/")
        self._root = f"{prefix}/" if prefix else ""
        try:
            import boto3
        except ImportError as error:
            raise CheckpointError(
                f"{self._name} needs boto3, which can't be imported ({error}); pip install boto3"
            ) from error
        with self._explained("opened"):
            self._bucket = boto3.resource("s3").Bucket(bucket)

    def __str__(self) -> str:
        return self._name

    def read_text(self, name: str) -> str | None:
        """See :class:`Folder`."""
        client = self._bucket.meta.client
        with self._explained("read"):
            try:
                found = client.get_object(Bucket=self._bucket.name, Key=self._root + name)
            except client.exceptions.NoSuchKey:
                return None
            return str(found["Body"].read().decode("utf-8", errors="replace"))

    def write(self, name: str, fill: Fill) -> None:
        """See :class:`Folder`. Large ones go in parts, several at a time."""
        data = io.BytesIO()
        fill(data)
        data.seek(0)
        with self._explained("written"):
            self._bucket.upload_fileobj(data, self._root + name)

    def folders(self) -> list[str]:
        """See :class:`Folder`."""
        with self._explained("listed"):
            pages = self._bucket.meta.client.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket.name, Prefix=self._root, Delimiter="/"
            )
            found = [common["Prefix"] for page in pages for common in page.get("CommonPrefixes", [])]
        return sorted(prefix.removeprefix(self._root).rstrip("/") for prefix in found)

    def sizes(self, folder: str) -> dict[str, int]:
        """See :class:`Folder`."""
        with self._explained("listed"):
            prefix = f"{self._root}{folder}/"
            return {found.key.removeprefix(prefix): int(found.size) for found in self._objects(folder)}

    def chunks(self, name: str) -> Iterator[bytes]:
        """See :class:`Folder`."""
        with self._explained("read"):
            body = self._bucket.meta.client.get_object(Bucket=self._bucket.name, Key=self._root + name)["Body"]
            yield from body.iter_chunks(_CHUNK_BYTES)

    def remove(self, folder: str) -> None:
        """See :class:`Folder`."""
        with self._explained("cleared"):
            self._objects(folder).delete()

    def remove_file(self, name: str) -> None:
        """See :class:`Folder`."""
        with self._explained("cleared"):
            self._bucket.Object(self._root + name).delete()

    @contextmanager
    def local(self, folder: str, *, on_bytes: OnBytes = ignore_bytes) -> Iterator[Path]:
        """See :class:`Folder`: a copy among this machine's temporary files (TMPDIR), removed afterwards."""
        with tempfile.TemporaryDirectory(prefix="deepspeed_bamboo-") as copy:
            (Path(copy) / folder).mkdir()
            with self._explained("read"):
                for found in self._objects(folder):
                    path = Path(copy) / found.key.removeprefix(self._root)
                    self._bucket.download_file(found.key, str(path), Callback=on_bytes)
            yield Path(copy)

    def _objects(self, folder: str) -> Any:
        return self._bucket.objects.filter(Prefix=f"{self._root}{folder}/")

    @contextmanager
    def _explained(self, action: str) -> Iterator[None]:
        """Turn whatever boto3 raises, and a full disk here, into CheckpointError."""
        from boto3.exceptions import Boto3Error
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            yield
        except (BotoCoreError, Boto3Error, ClientError, OSError, UnicodeError) as error:
            raise CheckpointError(
                f"{self._name} can't be {action} ({error}); check the bucket's name, the region and this machine's AWS "
                "permissions"
            ) from error
