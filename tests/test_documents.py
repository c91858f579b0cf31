"""What the documents tell a reader to do can be done with what a clone has."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from deepspeed_bamboo.cli.main import build_parser
from deepspeed_bamboo.config.section import SECTION, BambooConfig, load_bamboo_section
from deepspeed_bamboo.elastic.command_line import parse_command_line
from tests.config.test_readme_table import keys
from tests.scripts.loading import load_script

REPOSITORY = Path(__file__).parents[1]
DOCUMENTS = [*sorted(REPOSITORY.glob("*.md")), *sorted((REPOSITORY / "docs").glob("*.md"))]
README, GUIDE = REPOSITORY / "README.md", REPOSITORY / "docs" / "guide.md"
PROSE = [README, GUIDE]
PRESETS = sorted((REPOSITORY / "configs").glob("*.json"))
_LAUNCH = "--module deepspeed_bamboo.launch "


def text_of(document: Path) -> str:
    return document.read_text(encoding="utf-8")


def blocks(document: Path, *languages: str) -> Iterator[str]:
    """The blocks of code in one of ``languages``; "" for none named."""
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", text_of(document), re.MULTILINE | re.DOTALL):
        if language in languages:
            yield block


def commands(document: Path) -> list[str]:
    """Every ``ds_bamboo`` command that stands alone on a line of a block, or on several that go on."""
    lines = [line for block in blocks(document, "", "sh") for line in block.replace("\\\n", " ").splitlines()]
    return [part for line in lines for part in line.split(" && ") if part.startswith("ds_bamboo ")]


def launches(text: str) -> Iterator[list[str]]:
    """What follows the launch module in every command that is written out."""
    for line in re.sub(r"\\\n(//)?", " ", text).splitlines():
        _, launch, rest = line.partition(_LAUNCH)
        words = re.split(r"; | > | && ", rest.partition("  #")[0].strip().rstrip("'`"))[0]
        if launch and "..." not in words and "[" not in words:
            yield shlex.split(words.replace("\\", " "), comments=True)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_nothing_outside_of_the_repository_is_cited(document: Path) -> None:
    assert not re.search(r"\bDESIGN\b|\.\./shared", text_of(document))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text_of(document)):
        assert "://" in target or (document.parent / target).exists(), target


def test_commands_have_the_options_that_there_are() -> None:
    found = [command for document in DOCUMENTS for command in commands(document)]
    assert len(found) > 10
    for command in found:
        build_parser().parse_args(shlex.split(command, comments=True)[1:])  # ends the test if it can't


def test_launches_have_the_options_that_there_are_and_name_files_that_exist() -> None:
    train = load_script("train")
    found = [words for path in [*DOCUMENTS, *PRESETS] for words in launches(text_of(path))]
    scripts = [parse_command_line(words) for words in found]  # ends the test if it can't
    trained = [line for line in scripts if line.script == "scripts/train.py"]
    assert len(trained) > len(PRESETS)
    for line in trained:
        arguments = train.parse_arguments(line.arguments)
        assert (REPOSITORY / arguments.deepspeed_config).exists(), arguments.deepspeed_config


def test_settings_are_some_that_there_are() -> None:
    found = [block for document in DOCUMENTS for block in blocks(document, "json") if f'{{"{SECTION}"' in block]
    assert len(found) > 1
    for block in found:
        assert load_bamboo_section(json.loads(block)) is not None


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_scripts_are_ones_that_a_shell_reads(document: Path) -> None:
    for block in blocks(document, "sh"):
        plain = block.replace("[launcher flags]", "").replace("[--job NAME]", "").replace("[its arguments]", "")
        checked = subprocess.run(["bash", "-n"], input=plain, capture_output=True, text=True, check=False)
        assert checked.returncode == 0, checked.stderr


def test_manifests_are_yaml_and_say_what_they_are() -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML, which reads the manifests, is not installed")
    found = [part for document in DOCUMENTS for block in blocks(document, "yaml") for part in yaml.safe_load_all(block)]
    assert [part["kind"] for part in found if "kind" in part] == ["Service", "StatefulSet"]
    (task,) = (part for part in found if "kind" not in part)  # of SkyPilot
    assert set(task) == {"workdir", "resources", "secrets", "setup", "run"} and task["resources"]["use_spot"] is True
    checked = subprocess.run(["bash", "-n"], input=task["run"], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr


def offered_by_engine() -> set[str]:
    """The names of all methods, properties and attributes that the engine's files define, and stock's used here."""
    found = {"save_checkpoint", "load_checkpoint", "train_batch", "eval_batch", "global_steps"}
    for path in (REPOSITORY / "deepspeed_bamboo" / "runtime").rglob("*.py"):
        found |= set(re.findall(r"^    def (\w+)\(", text_of(path), re.MULTILINE))
    return found


@pytest.mark.parametrize("document", PROSE, ids=lambda document: document.name)
def test_names_in_the_text_are_some_that_there_are(document: Path) -> None:
    text = text_of(document)
    assert set(re.findall(r"`engine\.(\w+)", text)) <= offered_by_engine()
    for script in re.findall(r"\bscripts/[\w.]+", text):
        assert (REPOSITORY / script).exists(), script
    known = {*keys(BambooConfig), *BambooConfig.model_fields}
    for section in BambooConfig.model_fields:
        for key in re.findall(rf"`({section}\.\w+)`", text):
            assert key in known, key


def test_commands_in_the_text_are_some_that_there_are() -> None:
    found = [line for document in PROSE for line in re.findall(r"`ds_bamboo ([^`]*)`", text_of(document))]
    assert len(found) > 5
    commands = build_parser().format_help()
    for line in found:
        assert re.search(rf"^    {line.split()[0]} ", commands, re.MULTILINE), line


def test_presets_are_all_listed() -> None:
    table = text_of(README).partition("| preset in ")[2].partition("\n\n")[0]
    assert sorted(re.findall(r"`([\w-]+)`", table)) == [path.stem for path in PRESETS]
