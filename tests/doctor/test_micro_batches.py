"""How many micro-batches a DeepSpeed configuration gives each pipeline."""

from __future__ import annotations

from typing import Any

import pytest

from deepspeed_bamboo.doctor.settings import micro_batches_of


@pytest.mark.parametrize(
    ("settings", "count"),
    [
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4}, 8),
        ({"train_batch_size": 64, "gradient_accumulation_steps": 4}, 4),
        ({"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 16}, 16),
        ({"train_micro_batch_size_per_gpu": 4}, 1),
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3}, None),
        ({"train_batch_size": "auto", "gradient_accumulation_steps": 4}, None),
        ({}, None),
    ],
)
def test_what_is_missing_is_filled_in_as_deepspeed_does(settings: dict[str, Any], count: int | None) -> None:
    assert micro_batches_of(settings, pipelines=2) == count
