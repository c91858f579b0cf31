"""One loss after another, as a worker takes them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from deepspeed_bamboo.core.grid import Coordinate
from deepspeed_bamboo.runtime.comm.epoch_monitor import EpochChangedError
from deepspeed_bamboo.runtime.recovery.take_over import Failover


def test_what_a_loss_left_to_copy_is_not_copied_over_a_state_that_a_fatal_one_brought_back() -> None:
    copied, restored = list[Coordinate](), list[int]()
    nothing: Any = SimpleNamespace()
    config = SimpleNamespace(coordinator=SimpleNamespace(suspicion_limit_seconds=1.0))
    worker: Any = SimpleNamespace(
        session=SimpleNamespace(config=config, pulse=SimpleNamespace(at=lambda what: None)),
        links=None,
        view=None,
        placement=None,
        activity=SimpleNamespace(index=3),  # its script has not seen the end of it, others have
    )
    failover = Failover(
        worker,
        transfer=SimpleNamespace(copy_from_other_pipeline=copied.append),  # type: ignore[arg-type]
        shadow_rebuild=SimpleNamespace(end=lambda: None),  # type: ignore[arg-type]
        modes=SimpleNamespace(lost=lambda count: None),  # type: ignore[arg-type]
        world=nothing,
        abandon=lambda: None,
        evaluated_micro_batches=lambda: 0,
        restoring=SimpleNamespace(  # type: ignore[arg-type]
            depth=0,
            interrupt=lambda: None,
            attempt=lambda record, conclusion: restored.append(record.restoring),
            redo=lambda down_to: None,
        ),
    )
    failover._to_copy = [Coordinate(0, 1)]  # as an ordinary loss leaves it where the agreed step comes first
    fatal = SimpleNamespace(restoring=7, placement=None), SimpleNamespace(activity=4), SimpleNamespace(lost=("b", "c"))
    failover._recovery = SimpleNamespace(recover=lambda cause, placement: fatal)  # type: ignore[assignment]
    failover.run(EpochChangedError())
    failover.copy_lost()
    assert (restored, copied) == ([7], [])
