"""Real text as training samples: bytes of a file or a folder, cut into windows."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import numpy as np

from deepspeed_bamboo.models.tokens import Tokens, TokenWindows

BYTES = 256
_LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"})


def read_text(path: str | os.PathLike[str] | None = None) -> bytes:
    """The bytes to train on: of a file, or of all files in a folder in the order of their names.

    None: the Python standard library's own sources, which are on every machine.
    Raises ValueError for a path that isn't there or holds no bytes.
    """
    if path is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        files = _sources(root)
    else:
        root = Path(path)
        if not root.exists():
            raise ValueError(f"there is no file or folder {root} to train on; check the path")
        files = [root] if root.is_file() else [file for file in root.rglob("*") if file.is_file()]
    text = b"".join(file.read_bytes() for file in sorted(files, key=lambda file: file.relative_to(root).as_posix()))
    if not text:
        raise ValueError(f"there is nothing to train on in {root}; name a file or folder with text")
    return text


def _sources(root: Path) -> list[Path]:
    """The library's own files below ``root``. Does not look into the rest, where packages have ten thousand."""
    found: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _LEFT_OUT]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    return found


class TextWindows(TokenWindows):
    """Windows of text, for predicting each next byte."""

    def __init__(self, text: bytes, *, sequence_length: int, seed: int = 0) -> None:
        """Raises ValueError for a text with less than one window."""
        super().__init__(as_tokens(text), sequence_length=sequence_length, vocabulary=BYTES, seed=seed)


def as_tokens(text: bytes) -> Tokens:
    """Each byte as a token."""
    return np.frombuffer(text, dtype=np.uint8)
