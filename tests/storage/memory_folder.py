"""A folder for checkpoints in memory: the twin of a directory for tests that open thousands."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from deepspeed_bamboo.errors import CheckpointError
from deepspeed_bamboo.storage.folders import Fill, OnBytes, ignore_bytes


class MemoryFolder:
    """See :class:`deepspeed_bamboo.storage.folders.Folder`; ``files`` by name is all there is."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}

    def read_text(self, name: str) -> str | None:
        data = self.files.get(name)
        return None if data is None else data.decode("utf-8", errors="replace")

    def write(self, name: str, fill: Fill) -> None:
        data = io.BytesIO()
        fill(data)
        self.files[name] = data.getvalue()

    def folders(self) -> list[str]:
        return sorted({name.split("/")[0] for name in self.files if "/" in name})

    def sizes(self, folder: str) -> dict[str, int]:
        inside = {name: data for name, data in self.files.items() if name.startswith(f"{folder}/")}
        return {name.partition("/")[2]: len(data) for name, data in inside.items()}

    def chunks(self, name: str) -> Iterator[bytes]:
        if name not in self.files:
            raise CheckpointError(f"there is no {name}")
        yield self.files[name]

    def remove(self, folder: str) -> None:
        self.files = {name: data for name, data in self.files.items() if not name.startswith(f"{folder}/")}

    def remove_file(self, name: str) -> None:
        del self.files[name]

    @contextmanager
    def local(self, folder: str, *, on_bytes: OnBytes = ignore_bytes) -> Iterator[Path]:
        raise NotImplementedError(folder)
        yield Path()
