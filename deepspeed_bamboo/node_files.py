"""Reading what ``ds_bamboo plan`` is given: workers with node and zone (JSON or CSV), and a placement (JSON)."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from deepspeed_bamboo.core.placement import Placement
from deepspeed_bamboo.core.sites import WorkerSite
from deepspeed_bamboo.errors import ConfigError

COLUMNS = ("worker", "node", "zone")
_FORM = 'JSON: [{"worker": "w0", "node": "n0", "zone": "a"}, ...] or [["w0", "n0", "a"], ...]; CSV: w0,n0,a a line'


def read_sites(path: Path) -> list[WorkerSite]:
    """The workers in ``path``; an empty or missing zone is not known.

    A file that starts with a bracket is JSON, anything else CSV, with or without a heading. Raises ConfigError for
    what is neither, and OSError for a file that can't be read.
    """
    text = path.read_text(encoding="utf-8")
    is_json = text.lstrip().startswith(("[", "{"))
    rows = _json_rows(text, path) if is_json else _csv_rows(text)
    return [_site(row, place=place, path=path) for place, row in rows]


def read_placement(path: Path) -> Placement:
    """The placement in ``path``, as ``ds_bamboo plan --write`` wrote it. Raises ConfigError or OSError."""
    try:
        return Placement.from_json(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"no placement: {error!r}; give a file written by ds_bamboo plan --write", where=str(path)
        ) from error


def _json_rows(text: str, path: Path) -> Iterator[tuple[str, list[Any]]]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"not JSON: {error}; {_FORM}", where=str(path)) from error
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


def _csv_rows(text: str) -> Iterator[tuple[str, list[Any]]]:
    rows: Iterable[list[str]] = csv.reader(text.splitlines(), skipinitialspace=True)
    for number, row in enumerate(rows, start=1):
        cells: list[Any] = [cell.strip() for cell in row]
        is_heading = tuple(cells) in (COLUMNS, COLUMNS[:2])
        if any(cells) and not cells[0].startswith("#") and not is_heading:
            yield f"line {number}", cells


def _site(row: list[Any], *, place: str, path: Path) -> WorkerSite:
    cells = [*row, None][:3] if len(row) == 2 else row
    if len(cells) != 3 or not all(isinstance(cell, str) and cell for cell in cells[:2]):
        raise ConfigError(f"{place} is {row!r}; every worker needs a worker and a node, and may have a zone. {_FORM}",
                          where=str(path))  # fmt: skip
    if not isinstance(cells[2], str | None):
        raise ConfigError(f"{place} has the zone {cells[2]!r}; a zone is text, empty if not known", where=str(path))
    return WorkerSite(cells[0], cells[1], cells[2] or "")
