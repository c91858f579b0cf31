"""Checks the places for checkpoints and the event log: they can be written, in parts too, with all rights."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from deepspeed_bamboo.doctor.finding import Finding, warning
from deepspeed_bamboo.doctor.subject import Subject
from deepspeed_bamboo.errors import CheckpointError, ConfigError
from deepspeed_bamboo.eventlog.log import check_directory


def check_storage(subject: Subject) -> Iterator[Finding]:
    """Leaves nothing behind."""
    section = subject.section
    places = [("event_log", section.event_log), ("checkpoint.dir", section.checkpoint.dir)]
    for setting, place in places:
        if place is None or place.startswith("s3://"):
            continue
        parent = Path(place).expanduser().absolute().parent
        absent = setting == "checkpoint.dir" and not parent.exists()
        try:
            check_directory(place, setting=setting)
        except ConfigError as error:
            yield Finding(str(error), "on all machines")
        else:
            if absent:
                yield warning(
                    f"checkpoint.dir {place}: the folder {parent} is not there; a shared file system that is not "
                    "mounted looks like this",
                    "mount it, or make the folder, on all machines",
                )
    bucket = section.checkpoint.dir
    if bucket is not None and bucket.startswith("s3://"):
        yield from _bucket(bucket)
    elif bucket is None and section.redundancy.mode == "off":
        yield warning(
            'redundancy.mode is "off" and checkpoint.dir is not set: lost state may be lost for good',
            "set checkpoint.dir",
        )


def _bucket(location: str) -> Iterator[Finding]:
    name, _, prefix = location.removeprefix("s3://").partition("/")
    try:
        client = _client(location)
    except CheckpointError as error:
        yield Finding(f"checkpoint.dir: {error}", "on all machines")
        return
    key = f"{prefix.strip('/')}/doctor-{uuid.uuid4().hex}".lstrip("/")
    problems = []
    for right, use in _uses(client, name, key):
        problem = _refusal(use)
        if problem is None:
            continue
        problems.append(problem)
        remedy = f"allow {right} for the role of all machines"
        if "AccessDenied" not in problem and "Forbidden" not in problem:
            remedy = "check the bucket's name, the region, and the credentials of all machines"
        yield Finding(f"checkpoint.dir {location}: {problem}", remedy)
        if "AccessDenied" not in problem:
            break  # nothing else would go better
    if problems:
        _refusal(lambda: client.delete_object(Bucket=name, Key=key))


def _client(location: str) -> Any:
    """Raises CheckpointError without boto3, and where it knows no region."""
    from deepspeed_bamboo.storage.s3 import S3Folder

    name, _, prefix = location.removeprefix("s3://").partition("/")
    S3Folder(name, prefix.strip("/"))
    import boto3

    return boto3.client("s3")


def _uses(client: Any, bucket: str, key: str) -> Iterator[tuple[str, Callable[[], object]]]:
    """What checkpoints do, in an order in which each can be tried, with the name of the right."""
    place = {"Bucket": bucket, "Key": key}
    yield "s3:ListBucket (of the bucket)", lambda: client.list_objects_v2(Bucket=bucket, Prefix=key, MaxKeys=1)
    yield "s3:PutObject", lambda: client.put_object(**place, Body=b"doctor")
    yield "s3:GetObject", lambda: client.get_object(**place)["Body"].read()
    yield "s3:PutObject and s3:AbortMultipartUpload (files in parts)", lambda: _in_parts(client, place)
    yield "s3:DeleteObject", lambda: client.delete_object(**place)


def _in_parts(client: Any, place: dict[str, str]) -> None:
    upload = client.create_multipart_upload(**place)["UploadId"]
    try:
        client.upload_part(**place, UploadId=upload, PartNumber=1, Body=b"doctor")
    finally:
        client.abort_multipart_upload(**place, UploadId=upload)


def _refusal(use: Callable[[], object]) -> str | None:
    """What boto3 says against it; None for nothing."""
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        use()
    except (BotoCoreError, Boto3Error, ClientError) as error:
        return str(error)
    return None
