"""Keeps DeepSpeed's throughput timer from waiting for the device before every forward, also for what it receives.

Another timer measures the throughput that a pipeline prints. A timer without that setting is left alone.
"""

from __future__ import annotations

from typing import Any


def let_the_device_run(engine: Any) -> None:
    """Replace the settings of ``engine``'s timer, a model of pydantic's, by a copy without synchronization."""
    settings = engine.tput_timer.config
    if getattr(settings, "synchronized", False):
        engine.tput_timer.config = settings.model_copy(update={"synchronized": False})
