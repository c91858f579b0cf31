"""Lines for the user come also where the script has silenced ``print``, as many do on all ranks but the first."""

from __future__ import annotations

import builtins

import pytest

from deepspeed_bamboo import news


def test_lines_come_where_the_script_has_silenced_print(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(builtins, "print", lambda *_, **__: None)
    news.tell("a worker was lost", who="w1")
    news.say(ValueError("wrong"))
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("[bamboo ") and lines[0].endswith(" w1] a worker was lost")
    assert lines[1:] == ["wrong"]
