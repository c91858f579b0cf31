"""Manifests of the checkpoints that a script saves and loads itself."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepspeed_bamboo.core.checkpointing import FileFact
from deepspeed_bamboo.errors import CheckpointError
from deepspeed_bamboo.runtime.checkpoint.checking_together import choose_together
from deepspeed_bamboo.runtime.iteration.worker import Worker
from deepspeed_bamboo.runtime.job.news import tell_once
from deepspeed_bamboo.storage.checking import LATEST, Survey, candidate_of, described, problems_of, survey
from deepspeed_bamboo.storage.folders import Fill, LocalFolder
from deepspeed_bamboo.storage.manifest import NAMES, Manifest

_CHUNK_BYTES = 4 * 2**20


class SavedFiles:
    """In the place of an engine's ``checkpoint_engine``: saves with it, and hashes the files of ``folder``."""

    def __init__(self, engine: Any, folder: Path) -> None:
        self._engine = engine
        self._folder = folder
        self.facts: dict[str, FileFact] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def save(self, state_dict: Any, path: str) -> None:
        """As the engine's."""
        self._engine.save(state_dict, path)
        if Path(path).parent == self._folder:
            self.facts[Path(path).name] = _fact_of(Path(path))


def name_checkpoint(folder: Path, manifest: Manifest | None, *, tag: str, latest: bool) -> None:
    """Write the manifest of checkpoint ``tag``, whose files are all there, and then the file ``latest``.

    Raises CheckpointError when one can't be written.
    """
    place = LocalFolder(folder)
    if manifest is not None:
        for name in NAMES:
            place.write(f"{tag}/{name}", _text(manifest.to_text()))
    if latest:
        place.write(LATEST, _text(tag))


def tag_to_load(worker: Worker, load_dir: str | os.PathLike[str], tag: str | None) -> str | None:
    """The tag of the checkpoint in ``load_dir`` that is whole: ``tag``, or if that is None the newest one.

    None where there is nothing to load. Collective. Raises CheckpointError when ``tag`` is damaged, and when there are
    checkpoints of which none is whole.
    """
    folder, where = LocalFolder(Path(load_dir)), repr(os.fspath(load_dir))

    def seen() -> Survey:
        return survey(folder) if tag is None else Survey(str(tag), (candidate_of(folder, str(tag)),))

    choice = choose_together(
        worker, survey=seen, look=lambda found, share: problems_of(folder, found, share=share), where=where
    )
    for warning in choice.warnings:
        tell_once(worker, f"load_checkpoint: {warning}")
    for damaged, problems in choice.damaged.items():
        path = os.fspath(Path(load_dir) / damaged)
        worker.log_event("checkpoint", action="damaged", path=path, reason="; ".join(problems))
    if choice.error and tag is not None:
        raise CheckpointError(
            f"in {where} {described(choice.damaged)}; pass the tag of another one, or none for the newest whole one"
        )
    if choice.error:
        raise CheckpointError(choice.error)
    if choice.tag is None:
        tell_once(worker, f"load_checkpoint: there is no checkpoint in {where}; nothing is loaded")
        worker.log_event("checkpoint", action="nothing", path=os.fspath(load_dir))
    return choice.tag


def facts_of_parts(parts: Mapping[str, Mapping[str, Any]]) -> dict[str, FileFact]:
    """From what workers have reported about the files that they saved."""
    return {name: FileFact(*fact) for part in parts.values() for name, fact in part.items()}


def _fact_of(path: Path) -> FileFact:
    """Of a file that was written just now, so that it is still in memory."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while data := file.read(_CHUNK_BYTES):
            digest.update(data)
            size += len(data)
    return FileFact(size, digest.hexdigest())


def _text(text: str) -> Fill:
    return lambda file: file.write(text.encode("utf-8"))
