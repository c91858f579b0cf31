"""What the documents tell a reader to do can be done with what a clone has."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from deepspeed_bamboo.cli.main import build_parser

REPOSITORY = Path(__file__).parents[1]
DOCUMENTS = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]


def commands(document: Path) -> list[str]:
    """Every ``ds_bamboo`` command that stands alone on a line of a block."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", document.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.startswith("ds_bamboo ")]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_nothing_outside_of_the_repository_is_cited(document: Path) -> None:
    assert not re.search(r"\bDESIGN\b|\.\./shared", document.read_text(encoding="utf-8"))


def test_commands_have_the_options_that_there_are() -> None:
    found = [command for document in DOCUMENTS for command in commands(document)]
    assert len(found) > 10
    for command in found:
        build_parser().parse_args(shlex.split(command, comments=True)[1:])  # ends the test if it can't
