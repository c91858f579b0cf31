"""Reads the input of ``ds_bamboo plan``: workers with node and zone (JSON or CSV), and a placement (JSON)."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from deepspeed_bamboo.core.grid import Grid
from deepspeed_bamboo.core.placement import Placement
from deepspeed_bamboo.core.placing.sites import WorkerSite
from deepspeed_bamboo.core.timing import Profile
from deepspeed_bamboo.errors import ConfigError
from deepspeed_bamboo.text_files import UnreadableError, json_of, text_of

COLUMNS = ("worker", "node", "zone")
_FORM = (
    'JSON: [{"worker": "w0", "node": "n0", "zone": "a"}, ...] or [["w0", "n0", "a"], ...]; CSV: the heading '
    "worker,node,zone and a line like w0,n0,a for each worker"
)
# What people call columns; a first line of nothing else is a heading, and no worker.
_HEADINGS = frozenset({*COLUMNS, "name", "id", "rank", "slot", "host", "machine", "instance", "az", "region"})


def read_sites(path: Path) -> list[WorkerSite]:
    """The workers in ``path``; an empty or missing zone is not known.

    A file that starts with a bracket is JSON. Anything else is CSV, with or without a heading that names its columns.
    Raises ConfigError for what is neither, and for a file that can't be read.
    """
    text = _read(path, remedy=f"give the file of workers, as {_FORM}")
    is_json = text.lstrip().startswith(("[", "{"))
    rows = _json_rows(text, path) if is_json else _csv_rows(text, path)
    return [_site(row, place=place, path=path) for place, row in rows]


def read_placement(path: Path) -> Placement:
    """The placement in ``path``, as ``ds_bamboo plan --write`` wrote it. Raises ConfigError."""
    value = _read_json(path, remedy="give a file written by ds_bamboo plan --write")
    try:
        return Placement.from_json(value)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ConfigError(
            f"no placement: {error!r}; give a file written by ds_bamboo plan --write", where=str(path)
        ) from error


def read_profile(path: Path, grid: Grid) -> Profile:
    """The measured times in ``path``, as a job with ``bamboo.profile`` wrote them. Raises ConfigError."""
    remedy = "give a file that a job wrote, with the setting bamboo.profile"
    value = _read_json(path, remedy=remedy)
    try:
        profile = Profile.from_json(value)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ConfigError(f"no profile: {error!r}; {remedy}", where=str(path)) from error
    if len(profile.forward) != grid.stages:
        raise ConfigError(
            f"a profile of {len(profile.forward)} stages for a grid of {grid.stages}; give the job's own --stages",
            where=str(path),
        )
    return profile


def measured_micro_batches(path: Path) -> int | None:
    """Of a step in each pipeline, where the profile in ``path`` says so. Raises ConfigError."""
    found = _read_json(path, remedy="give a file of ds_bamboo profile")
    count = found.get("micro_batches") if isinstance(found, dict) else None
    return count if type(count) is int and count >= 1 else None


def _read(path: Path, *, remedy: str) -> str:
    try:
        return text_of(path)
    except UnreadableError as error:
        raise ConfigError(f"{error}; {remedy}", where=str(path)) from error


def _read_json(path: Path, *, remedy: str) -> Any:
    text = _read(path, remedy=remedy)
    try:
        return json_of(text)
    except UnreadableError as error:
        raise ConfigError(f"{error}; {remedy}", where=str(path)) from error


def _json_rows(text: str, path: Path) -> Iterator[tuple[str, list[Any]]]:
    try:
        value = json_of(text)
    except UnreadableError as error:
        raise ConfigError(f"{error}; {_FORM}", where=str(path)) from error
    if not isinstance(value, list):
        raise ConfigError(f"a {type(value).__name__} instead of a list of workers; {_FORM}", where=str(path))
    for number, entry in enumerate(value, start=1):
        place = f"entry {number}"
        if isinstance(entry, dict):
            unknown = [key for key in entry if key not in COLUMNS]
            if unknown:
                raise ConfigError(f"{place} has {unknown[0]!r}; valid are {', '.join(COLUMNS)}", where=str(path))
            yield place, [entry.get(column) for column in COLUMNS]
        else:
            yield place, list(entry) if isinstance(entry, list) else [entry]


def _csv_rows(text: str, path: Path) -> Iterator[tuple[str, list[Any]]]:
    try:
        rows = list(csv.reader(text.splitlines(), skipinitialspace=True))
    except csv.Error as error:
        raise ConfigError(f"neither JSON nor CSV ({error}); {_FORM}", where=str(path)) from error
    order: Sequence[str] | None = None
    for number, row in enumerate(rows, start=1):
        cells: list[Any] = [cell.strip() for cell in row]
        if not any(cells) or cells[0].startswith("#"):
            continue
        if order is None:
            order = _heading(cells, place=f"line {number}", path=path)
            if order is not None:
                continue
            order = COLUMNS
        yield f"line {number}", _sorted_cells(cells, order)


def _heading(cells: Sequence[str], *, place: str, path: Path) -> Sequence[str] | None:
    """The columns that a first line names, or None when it is a worker. Raises ConfigError for other columns."""
    names = [cell.lower() for cell in cells]
    if not set(names) <= _HEADINGS:
        return None
    if len(set(names)) < len(names) or not set(COLUMNS[:2]) <= set(names) <= set(COLUMNS):
        raise ConfigError(
            f"{place}, {','.join(cells)}, is a heading with other columns than worker,node,zone (which name each "
            f"worker, its machine, and its zone, which may be left out). {_FORM}",
            where=str(path),
        )
    return names


def _sorted_cells(cells: list[Any], order: Sequence[str]) -> list[Any]:
    """``cells`` in the order of COLUMNS; those of a line with too many or too few as they are."""
    if len(cells) != len(order):
        return cells
    return [cells[order.index(column)] for column in COLUMNS if column in order]


def _site(row: list[Any], *, place: str, path: Path) -> WorkerSite:
    cells = [*row, None][:3] if len(row) == 2 else row
    if len(cells) != 3 or not all(isinstance(cell, str) and cell for cell in cells[:2]):
        raise ConfigError(f"{place} is {row!r}; every worker needs a worker and a node, and may have a zone. {_FORM}",
                          where=str(path))  # fmt: skip
    if not isinstance(cells[2], str | None):
        raise ConfigError(f"{place} has the zone {cells[2]!r}; a zone is text, empty if not known", where=str(path))
    return WorkerSite(cells[0], cells[1], cells[2] or "")
