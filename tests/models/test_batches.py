"""Step k trains on samples [kB, (k+1)B), each once, in the order of DeepSpeed's own sampler."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from deepspeed_bamboo.models.batches import BatchShape, StepBatches


class Numbers(Dataset[tuple[Tensor, Tensor]]):
    """Sample k is (k, -k)."""

    def __len__(self) -> int:
        return 240

    def __getitem__(self, k: int) -> tuple[Tensor, Tensor]:
        return torch.tensor(k), torch.tensor(-k)


class Clock:
    step = 0

    def __call__(self) -> int:
        return self.step


SHAPES = st.builds(BatchShape, st.integers(1, 5), st.integers(1, 8), st.integers(1, 4))


@given(SHAPES, st.integers(0, 1000))
def test_a_step_uses_its_samples_once_each(shape: BatchShape, step: int) -> None:
    used = [
        index
        for pipeline in range(shape.pipelines)
        for micro_batch in range(shape.micro_batches)
        for index in shape.indices(step=step, pipeline=pipeline, micro_batch=micro_batch)
    ]
    assert sorted(used) == list(range(step * shape.samples, (step + 1) * shape.samples))


@pytest.mark.parametrize("pipeline", [0, 1, 2])
def test_the_order_is_that_of_deepspeeds_loader(pipeline: int) -> None:
    shape, clock = BatchShape(micro_batch_size=2, micro_batches=4, pipelines=3), Clock()
    sampler = DistributedSampler(Numbers(), num_replicas=3, rank=pipeline, shuffle=False)
    theirs = iter(DataLoader(Numbers(), batch_size=2, sampler=sampler))
    ours = StepBatches(Numbers(), shape=shape, current_step=clock, pipeline=pipeline)
    for clock.step in range(10):
        for _ in range(4):
            for one, other in zip(next(ours), next(theirs), strict=True):
                assert torch.equal(one, other)


def test_it_is_in_position_wherever_the_engine_is() -> None:
    clock = Clock()
    shape = BatchShape(micro_batch_size=2, micro_batches=2)
    always, late = (StepBatches(Numbers(), shape=shape, current_step=clock) for _ in range(2))
    for clock.step in range(3):
        for _ in range(2):
            next(always)
    clock.step = 3
    assert next(late)[0].tolist() == next(always)[0].tolist() == [12, 13]


def test_an_abandoned_step_does_not_shift_the_next() -> None:
    clock = Clock()
    batches = StepBatches(Numbers(), shape=BatchShape(2, 2), current_step=clock)
    next(batches)
    clock.step = 1
    assert next(batches)[0].tolist() == [4, 5]


def test_a_step_has_no_more_than_its_micro_batches() -> None:
    batches = StepBatches(Numbers(), shape=BatchShape(2, 2), current_step=Clock())
    assert len(list(batches)) == 2


def test_any_batch_can_be_had_without_moving() -> None:
    batches = StepBatches(Numbers(), shape=BatchShape(2, 2, pipelines=2), current_step=Clock())
    assert batches.batch_at(step=5, pipeline=1, micro_batch=1)[0].tolist() == [45, 47]
    assert next(batches)[0].tolist() == [0, 2]
