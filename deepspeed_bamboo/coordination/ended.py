"""How this user's jobs on this machine ended whose own etcd ended with them."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from pathlib import Path

from deepspeed_bamboo.coordination.records import EndedJob
from deepspeed_bamboo.coordination.values import OddValueError, decode_as, encode

_KEPT = 20
_KEPT_SECONDS = 86_400.0
_LIMIT_BYTES = 100_000


def ended_folder(environment: Mapping[str, str]) -> Path:
    """The folder for these notes: below XDG_STATE_HOME, by default ~/.local/state."""
    state = environment.get("XDG_STATE_HOME") or str(Path("~/.local/state").expanduser())
    return Path(state) / "deepspeed_bamboo" / "ended"


def note_end(end: EndedJob, folder: Path) -> None:
    """Keep ``end``, and the newest few beside it. If the folder can't be written, nothing is kept."""
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = folder / f".{end.job}.{os.getpid()}"
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as stream:  # noqa: PTH123
            stream.write(encode(end.to_json()))
        temporary.replace(folder / end.job)
        by_age = sorted(folder.iterdir(), key=lambda file: file.stat().st_mtime, reverse=True)
        for file in by_age[_KEPT:]:
            file.unlink(missing_ok=True)


def ended_jobs(folder: Path) -> list[EndedJob]:
    """Those of the last day, the newest first."""
    found = []
    for file in folder.glob("[!.]*"):
        with contextlib.suppress(OSError, OddValueError, UnicodeDecodeError):
            end = decode_as("ended_job", file.read_text(encoding="utf-8")[:_LIMIT_BYTES])
            if time.time() - end.time_seconds < _KEPT_SECONDS:
                found.append(end)
    return sorted(found, key=lambda end: end.time_seconds, reverse=True)
