"""The table of settings has every key there is, and no other; README's, the most important ones."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel

from deepspeed_bamboo.config.section import BambooConfig

REPOSITORY = Path(__file__).parents[2]


def keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every key that takes a value, as the tables write it: section.key."""
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from keys(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name


def shown(page: str) -> Iterator[str]:
    """The keys in the page's table; those after a comma belong to the section of the first."""
    table = (REPOSITORY / page).read_text(encoding="utf-8").partition("| key | default |")[2].partition("\n\n")[0]
    for row in table.splitlines()[2:]:
        first, *others = re.findall(r"`([^`]+)`", row.split("|")[1])
        section = first.rpartition(".")[0]
        yield first
        yield from (f"{section}.{name}" if section else name for name in others)


def test_the_table_is_complete() -> None:
    assert sorted(shown("docs/configuration.md")) == sorted(keys(BambooConfig))


def test_readme_shows_keys_that_exist() -> None:
    found = list(shown("README.md"))
    assert len(found) > 4 and set(found) <= set(keys(BambooConfig))
