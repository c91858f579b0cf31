"""``ds_bamboo plan``: files of workers, the table, the cost of losses, errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deepspeed_bamboo.cli.main import main
from deepspeed_bamboo.cli.node_files import read_sites

ROWS = [["w0", "n0", "a"], ["w1", "n1", "b"], ["w2", "n2", "a"], ["w3", "n3", "b"]]


@pytest.fixture
def nodes(tmp_path: Path) -> Path:
    file = tmp_path / "nodes.csv"
    file.write_text("worker,node,zone\n" + "\n".join(map(",".join, ROWS)) + "\n")
    return file


def test_all_forms_of_files_say_the_same(nodes: Path, tmp_path: Path) -> None:
    lists, objects = tmp_path / "lists.json", tmp_path / "objects.json"
    lists.write_text(json.dumps(ROWS))
    objects.write_text(json.dumps([dict(zip(("worker", "node", "zone"), row, strict=True)) for row in ROWS]))
    assert [list(site) for site in read_sites(nodes)] == ROWS
    assert read_sites(lists) == read_sites(objects) == read_sites(nodes)


def test_a_missing_zone_is_unknown(tmp_path: Path) -> None:
    file = tmp_path / "nodes.csv"
    file.write_text("# spot\nw0,n0\n\nw1, n1, \n")
    assert [site.zone for site in read_sites(file)] == ["", ""]


@pytest.mark.parametrize("text", ["Worker, Node, Zone\nw0,n0,a\n", "# spot\nzone,node,worker\na,n0,w0\n", "w0,n0,a\n"])
def test_a_heading_says_which_column_is_which(text: str, tmp_path: Path) -> None:
    file = tmp_path / "nodes.csv"
    file.write_text(text)
    assert [list(site) for site in read_sites(file)] == [["w0", "n0", "a"]]


def test_the_plan_shows_coordinates_and_losses(nodes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--nodes", str(nodes), "--pipelines", "1", "--stages", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:4] == ["coordinate", "worker", "node", "zone"]
    assert [line.split()[0] for line in lines[1:5]] == ["0.0", "0.1", "0.2", "0.3"]
    assert "standby: none" in lines
    at = next(number for number, line in enumerate(lines) if line.startswith("loss of zone"))
    assert lines[at + 1].split() == ["a", "2", "2", "0", "2", "survived"]
    assert {"neighbours on one node: none", "neighbours in one zone: none", "moved to new owners: nothing"} <= {*lines}
    assert "shadow lost: coordinates that stay where they are, unprotected until" in " ".join(lines)
    assert max(map(len, lines)) <= 80


def test_the_plan_says_why_neighbours_have_to_share_a_zone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "nodes.csv"
    file.write_text("w0,n0,a\nw1,n1,a\nw2,n2,a\nw3,n3,b\n")
    assert main(["plan", "--nodes", str(file), "--pipelines", "1", "--stages", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (
        "neighbours in one zone: 2 of 4 pairs, the fewest possible: 2 zones can take 3 of the 4 coordinates without "
        "two neighbours on the same, and the 1 left over make 2 pairs moved"
    ) in " ".join(" ".join(lines).split())
    assert max(map(len, lines)) <= 80


def test_one_zone_is_a_fatal_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "nodes.json"
    file.write_text(json.dumps([["w0", "n0", "a"], ["w1", "n1", "a"]]))
    assert main(["plan", "--nodes", str(file), "--pipelines", "1", "--stages", "2"]) == 0
    assert "FATAL: 0.0, 0.1" in capsys.readouterr().out


def test_a_written_plan_is_read_as_the_current_one(nodes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = nodes.parent / "now.json"
    command = ["plan", "--nodes", str(nodes), "--pipelines", "2", "--stages", "2"]
    assert main([*command, "--write", str(written)]) == 0
    capsys.readouterr()
    assert main([*command, "--current", str(written)]) == 0
    assert capsys.readouterr().out.count(" stays\n") == 4


@pytest.mark.parametrize("option", ["--nodes", "--current", "--write"])
def test_a_file_that_cannot_be_used_is_named_with_a_remedy(
    option: str, nodes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"--nodes": str(nodes), "--pipelines": "1", "--stages": "4", option: "/proc/nope"}
    assert main(["plan", *(part for pair in options.items() for part in pair)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"ds_bamboo plan: {'--write ' if option == '--write' else ''}/proc/nope: can't be ")
    assert "; give " in error and "Errno" not in error


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("w0\n", "line 1 is ['w0']"),
        ("name,zone\nw0,a\n", "line 1, name,zone, is a heading with other columns than worker,node,zone"),
        ("worker,zone\nw0,a\n", "CSV: the heading worker,node,zone and a line like w0,n0,a for each worker"),
        ("worker,worker,node\nw0,a\n", "is a heading with other columns"),
        ("worker,node,zone\nw0,n0,a,b\n", "line 2 is ['w0', 'n0', 'a', 'b']"),
        ("[1]", "entry 1 is [1]"),
        ("[", "not JSON"),
        ("{}", "a dict instead of a list"),
        ('[{"worker": "w0", "nod": "n0"}]', "'nod'; valid are worker, node, zone"),
        ('[["w0", "n0", 3]]', "a zone is text"),
        ("", "at least one"),
        ("w0,n0,a\nw0,n0,a\n", "listed twice"),
    ],
)
def test_errors_say_what_and_where(text: str, named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "nodes"
    file.write_text(text)
    assert main(["plan", "--nodes", str(file), "--pipelines", "1", "--stages", "2"]) == 2
    assert named in capsys.readouterr().err


def test_a_current_that_is_no_placement_is_refused(nodes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "--nodes", str(nodes), "--pipelines", "1", "--stages", "2", "--current", str(nodes)]
    assert main(command) == 2
    assert "ds_bamboo plan --write" in capsys.readouterr().err


def test_the_plan_knows_mode_and_zero_and_its_exit_code_says_what_is_not_survived(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "nodes.csv"
    file.write_text("w0,n0,a\nw1,n1,b\nw2,n2,a\nw3,n3,b\n")
    command = ["plan", "--nodes", str(file), "--pipelines", "2", "--stages", "2"]
    assert main(command) == 0
    assert main([*command, "--mode", "off"]) == 3
    shown = capsys.readouterr().out
    assert "not survived: the loss of node n0, or of node n1" in shown and "zone a" in shown.splitlines()[-1]
    main([*command, "--mode", "off", "--zero", "0"])
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in lines if line.startswith(("n0", "n1", "n2", "n3"))]
    assert [row[1:] for row in rows] == [["1", "0", "1", "0", "survived"]] * 4, "the other pipeline has the same"


def test_the_loss_of_the_only_zone_is_nothing_that_a_plan_could_change(tmp_path: Path) -> None:
    file = tmp_path / "nodes.csv"
    file.write_text("w0,n0,a\nw1,n1,a\n")
    assert main(["plan", "--nodes", str(file), "--pipelines", "1", "--stages", "2"]) == 0
    file.write_text("w0,n0,a\nw1,n0,a\n")
    assert main(["plan", "--nodes", str(file), "--pipelines", "1", "--stages", "2"]) == 3


def test_two_copies_and_which_two_losses_they_survive(nodes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "--nodes", str(nodes), "--pipelines", "1", "--stages", "4"]
    assert main([*command, "--copies", "2", "--write", str(nodes.parent / "two.json")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "  second shadow  its node  its zone  state" in lines[0]
    assert all(len({line.split()[1], line.split()[4], line.split()[7]}) == 3 for line in lines[1:5])
    assert "loss of two workers at once: survived, whichever they are" in lines
    assert "loss of two nodes at once: survived, whichever they are" in lines
    # As the placement of now, with one copy again.
    assert main([*command, "--current", str(nodes.parent / "two.json")]) == 0
    assert "second shadow" not in capsys.readouterr().out
    assert main([*command, "--copies", "2", "--mode", "off"]) == 2
    assert "--copies 2 and --mode off: a second shadow needs mode lazy, eager or auto" in capsys.readouterr().err


def test_two_losses_that_two_copies_do_not_survive(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "nodes.csv"
    file.write_text("w0,n0,a\nw1,n0,a\nw2,n1,b\nw3,n1,b\nw4,n2,b\nw5,n2,b\n")
    assert main(["plan", "--nodes", str(file), "--pipelines", "1", "--stages", "6", "--copies", "2"]) == 0
    out = capsys.readouterr().out
    assert "loss of two nodes at once: survived, whichever they are" in out
    assert "loss of two zones at once" not in out  # there are two
