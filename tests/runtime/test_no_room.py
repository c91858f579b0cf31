"""A device that is full since a loss."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepspeed_bamboo.protocol import EXIT_EXPELLED, EXIT_JOB_FAILED
from deepspeed_bamboo.runtime.job.no_room import end_for_want_of_machines, is_for_want_of_machines

FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore words")


def test_only_since_a_loss_is_it_for_want_of_machines() -> None:
    loss: Any = SimpleNamespace()
    assert is_for_want_of_machines(FULL, last_loss=loss)
    assert not is_for_want_of_machines(FULL, last_loss=None)
    assert not is_for_want_of_machines(RuntimeError("another one"), last_loss=loss)


@pytest.mark.parametrize("waits_seconds", [0.0, 60.0])
def test_it_is_no_error_of_the_script(waits_seconds: float, capfd: pytest.CaptureFixture[str]) -> None:
    calls: list[tuple[str, Any]] = []
    record = SimpleNamespace(waits_seconds=waits_seconds)
    session: Any = SimpleNamespace(
        worker="w1",
        interruption=SimpleNamespace(active=record),
        coordinator=SimpleNamespace(
            fail=lambda failure: calls.append((failure.kind, failure.message)),
            wait_for_machines=lambda of, *, reason, proposer: calls.append(("waits", reason)),
        ),
    )
    code = end_for_want_of_machines(session, FULL)
    [(kind, text)] = calls
    assert "worker w1 has no room on its device for what losses have given it (CUDA out of memory" in text
    if waits_seconds:
        assert (code, kind) == (EXIT_EXPELLED, "waits")
    else:
        assert (code, kind) == (EXIT_JOB_FAILED, "fatal_loss") and "with more machines" in text
    assert "w1 has no room" in capfd.readouterr().err
