"""The manifest of a checkpoint: which files belong to it, and what was written into each.

It is written when all of them are there, before the file ``latest`` names the checkpoint, as two equal files, so that
one damaged file never makes a whole checkpoint look like one from before there were manifests.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from deepspeed_bamboo.core.checkpointing import FileFact, facts_from_json, facts_to_json
from deepspeed_bamboo.errors import CheckpointError

NAMES = ("bamboo_manifest.json", "bamboo_manifest.copy.json")
_FORMAT = 1
_CHECKSUM = "checksum"


@dataclass(frozen=True)
class Manifest:
    """``tag``: the checkpoint's folder; ``step``: steps done; ``grid``: pipelines and stages; ``files``: by name.

    ``named``: whether ``latest`` was to name it. ``digest``: ``engine.state_digest()`` of the state, where it is known.
    """

    tag: str
    step: int
    grid: tuple[int, int]
    files: Mapping[str, FileFact] = field(default_factory=dict)
    named: bool = True
    digest: str | None = None

    def to_text(self) -> str:
        """What the file says: JSON with a checksum of its own."""
        value = {
            "format": _FORMAT,
            "tag": self.tag,
            "step": self.step,
            "grid": list(self.grid),
            "named": self.named,
            "digest": self.digest,
            "files": facts_to_json(self.files),
        }
        return json.dumps({**value, _CHECKSUM: _checksum(value)}, indent=1)

    @classmethod
    def parse(cls, text: str) -> Manifest:
        """Inverse of :meth:`to_text`. Raises CheckpointError that says what is wrong."""
        try:
            value = json.loads(text)
            if not isinstance(value, dict):
                raise CheckpointError("is no JSON object")
            stated = value.pop(_CHECKSUM, None)
            if stated != _checksum(value):
                raise CheckpointError("does not match its own checksum")
            if value["format"] != _FORMAT:
                raise CheckpointError(f"has format {value['format']!r}; this version reads format {_FORMAT}")
            pipelines, stages = value["grid"]
            return cls(
                tag=str(value["tag"]),
                step=int(value["step"]),
                grid=(int(pipelines), int(stages)),
                files=facts_from_json(value["files"]),
                named=bool(value["named"]),
                digest=value["digest"],
            )
        except RecursionError as error:
            raise CheckpointError("is nested too deeply") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"can't be parsed ({type(error).__name__}: {error})") from error


class MeasuredFile:
    """Writes to ``file``, and counts size and checksum on the way; hashing takes no second reading."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._size = 0
        self._hash = hashlib.sha256()

    def write(self, data: Any) -> int:
        """Write ``data``, any buffer of bytes."""
        view = memoryview(data).cast("B")
        self._hash.update(view)
        self._size += len(view)
        self._file.write(view)
        return len(view)

    def flush(self) -> None:
        """As the file's."""
        self._file.flush()

    def fact(self) -> FileFact:
        """Of all that was written."""
        return FileFact(self._size, self._hash.hexdigest())


def _checksum(value: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
