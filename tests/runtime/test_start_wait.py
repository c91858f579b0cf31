"""Workers whose scripts come late to the start."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.constants import default_pg_timeout

from deepspeed_bamboo.errors import BambooError
from deepspeed_bamboo.runtime.job import session
from deepspeed_bamboo.runtime.job.session import START_SECONDS, WorkerSession


@pytest.mark.parametrize("comes_after_seconds", [0, 59, 1700, 1900])
def test_workers_wait_for_each_other_as_long_as_torch_does(
    comes_after_seconds: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert default_pg_timeout.total_seconds() == START_SECONDS
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: now.__setitem__(0, now[0] + 10))
    monkeypatch.setattr(session, "time", clock)

    def members() -> dict[str, str]:
        return {"a": "here", "b": "here"} if now[0] >= comes_after_seconds else {"a": "here"}

    stub: Any = SimpleNamespace(
        worker="a", coordinator=SimpleNamespace(members=members), interruption=SimpleNamespace(check=lambda: None)
    )
    if comes_after_seconds > START_SECONDS:
        with pytest.raises(BambooError, match="1 of 2 workers registered within 1800 s"):
            WorkerSession.members(stub, expected=2)
    else:
        assert WorkerSession.members(stub, expected=2) == {"a": "here", "b": "here"}
    assert capsys.readouterr().err.count("1 of 2 workers have come") == int(comes_after_seconds > 60)
