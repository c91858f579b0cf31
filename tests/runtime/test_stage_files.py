"""What a worker's stages are saved as and given to shadows by, without a job."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from deepspeed_bamboo.runtime.checkpoint.beginning import Beginning
from deepspeed_bamboo.runtime.checkpoint.stage_files import StageFiles


class _Worker:
    """Does an activity twice, as after a recovery that gives it another index."""

    step = 7

    def __init__(self) -> None:
        self.activity = SimpleNamespace(index=3)

    def agree_on(self, kind: str, value: Callable[[], Any]) -> dict[str, Any]:
        value()
        self.activity.index = 5
        return {"w0": value()}

    def log_event(self, kind: str, **fields: Any) -> None: ...


def _files(worker: _Worker, *, stock: Any = None, transfer: Any = None) -> StageFiles:
    around = SimpleNamespace(make_alike=lambda: None, loaded=lambda: None, alike=lambda: None, repair=lambda: None)
    return StageFiles(worker, stock=stock, transfer=transfer, beginning=Beginning(), around=around)  # type: ignore[arg-type]


def test_shadows_are_refreshed_under_the_name_that_all_have_after_a_recovery() -> None:
    labels: list[str] = []
    transfer = SimpleNamespace(refresh_shadows=lambda *, label: labels.append(label))
    _files(_Worker(), transfer=transfer).refresh_shadows()
    assert labels == ["3/refresh", "5/refresh"]


@pytest.mark.parametrize("directory", ["", "s3://bucket/x", "/tmp/x"])
def test_stock_gets_the_directory_as_the_script_wrote_it(directory: str) -> None:
    """And its client state, which is not changed, with the number of the call."""
    seen: list[Any] = []
    stock = SimpleNamespace(
        checkpoint_engine=SimpleNamespace(is_decoupled=lambda: True),
        save=lambda folder, *, client_state, **_: seen.append((folder, client_state)),
    )
    worker, state = _Worker(), {"k": 1}
    _files(worker, stock=stock).save(directory, None, client_state=state, latest=True, options={})
    assert seen == [(directory, {"k": 1, "bamboo_call": worker.step})] and state == {"k": 1}
