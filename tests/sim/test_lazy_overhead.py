"""What a preset charges for keeping replicas covers what was measured and what must travel (docs/simulator.md)."""

from __future__ import annotations

import math

import pytest

from deepspeed_bamboo.sim.scenario import preset_names
from deepspeed_bamboo.sim.steptimes import Grid

from .common import preset_job

MEASURED = 0.01  # lazy over off on 2 H200, docs/results.md
BYTES_PER_GRADIENT = 2
BYTES_PER_SECOND = 1.25e9  # 10 Gb/s


@pytest.mark.parametrize("preset", preset_names())
def test_replicas_are_charged_as_if_nothing_hid_their_gradients(preset: str) -> None:
    job = preset_job(preset, run__duration_hours=1.0)
    model, live = job.scenario.model, job.scenario.policies.live
    assert live is not None
    grid = Grid(live.pipelines, live.stages)
    most_hosted = math.ceil(grid.size / (job.scenario.market.capacity // 2))
    mirrored_seconds = model.parameters / live.stages * BYTES_PER_GRADIENT * most_hosted / BYTES_PER_SECOND
    share = mirrored_seconds / job.plain_steps.hosted_seconds(grid, most_hosted=most_hosted)
    assert live.lazy_overhead >= round(MEASURED + share, 2)
