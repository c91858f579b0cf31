"""The number of pipelines, which a worker must know before its script makes a PipelineModule."""

from __future__ import annotations

from deepspeed_bamboo.config.section import BambooConfig
from deepspeed_bamboo.errors import CheckpointError
from deepspeed_bamboo.protocol import PIPELINES
from deepspeed_bamboo.storage.checking import LATEST, candidate_of
from deepspeed_bamboo.storage.folders import open_folder


def told_pipelines(config: BambooConfig) -> int | None:
    """``topology.pipelines``, or those of the checkpoint that the job continues from; None: as many as workers fill.

    Asked once for all slots. Only the manifest of the checkpoint that ``latest`` names is read; whether that can be
    loaded, and what is wrong if not, is for the workers to find and to say.
    """
    if config.topology.pipelines is not None or config.checkpoint.dir is None:
        return config.topology.pipelines
    try:
        folder = open_folder(config.checkpoint.dir)
        tag = (folder.read_text(LATEST) or "").strip()
        manifest = candidate_of(folder, tag).manifest if tag else None
    except CheckpointError:
        return None
    return None if manifest is None else manifest.grid[0]


def grid_environment(pipelines: int | None) -> tuple[tuple[str, str], ...]:
    """The environment variables that carry it to a worker."""
    return () if pipelines is None else ((PIPELINES, str(pipelines)),)
