"""Without a fault the plugin computes what DeepSpeed computes, bit for bit (issue 2, criterion 4)."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.runtime.jobs import JobResult, Jobs
from tests.runtime.scenarios import Training, train_all

CLIPPED = {"gradient_clipping": 0.05}
BF16 = {"bf16": {"enabled": True}}
WARM_UP = {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.01, "warmup_num_steps": 10}}

OFFLOADED = {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}

# On four workers. With three or more pipelines a sum depends on the order of its terms, which stock
# leaves to gloo and NCCL, so there the plugin has an order of its own.
CASES = [
    Training("plain-1x4", 4, settings={"scheduler": WARM_UP}),
    Training("clipped-2x2", 2, settings=CLIPPED, evaluate_before=(0, 1)),
    Training("tied-twice-1x4", 4, layers="tied_twice"),
    Training("bf16-2x2", 2, layers="tied", settings={**CLIPPED, **BF16}),
    Training("seeded-dropout-2x2", 2, dropout=0.3, module={"seed_layers": True, "activation_checkpoint_interval": 1}),
    Training("few-micro-batches-1x4", 4, micro_batches=2),
    Training("buffers-1x4", 4, layers="normalised", module={"activation_checkpoint_interval": 2}),
    Training("data-set-2x2", 2, training_data=True),
    Training("offloaded-2x2", 2, settings={**CLIPPED, **OFFLOADED}),
]
# DeepSpeed's own Adam on the host, whose first use compiles; powers of these betas and products of them differ.
OWN_ADAM = {"optimizer": {"type": "AdamW", "params": {"lr": 0.01, "betas": [0.9, 0.99]}}}
# In another grid, or without checkpointing, than those above.
SWEEP = [
    Training("offloaded-own-adam-2x2", 2, steps=6, settings={**CLIPPED, **OFFLOADED, **OWN_ADAM}),
    Training("offloaded-bf16-1x4", 4, layers="tied", settings={**CLIPPED, **BF16, **OFFLOADED}),
    Training("bf16-1x4", 4, layers="tied", settings={**CLIPPED, **BF16}),
    Training("seeded-dropout-1x4", 4, dropout=0.3, module={"seed_layers": True}, evaluate_before=(1,)),
]


@pytest.fixture(scope="module")
def both(jobs: Jobs) -> JobResult:
    """Every case of the test command with DeepSpeed's engine and with the plugin's, in one job."""
    return run_both(jobs, CASES)


@pytest.fixture(scope="module")
def both_of_sweep(jobs: Jobs) -> JobResult:
    """The same for the others."""
    return run_both(jobs, SWEEP)


def run_both(jobs: Jobs, cases: list[Training]) -> JobResult:
    trainings = [run for case in cases for run in (case, plugin(case))]
    result = jobs.run(train_all, world=4, trainings=trainings)
    assert result.codes == [0, 0, 0, 0], result.transcript()
    return result


def plugin(case: Training) -> Training:
    return dataclasses.replace(case, name=f"{case.name}-on", faults=[])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("what", ["losses", "evaluations", "hashes", "steps"])
def test_same_as_deepspeeds_own_engine(both: JobResult, case: Training, what: str) -> None:
    compare(both, case, what)


@pytest.mark.sweep
@pytest.mark.parametrize("case", SWEEP, ids=lambda case: case.name)
@pytest.mark.parametrize("what", ["losses", "evaluations", "hashes", "steps"])
def test_same_as_deepspeeds_own_engine_in_the_other_grid(both_of_sweep: JobResult, case: Training, what: str) -> None:
    compare(both_of_sweep, case, what)


def compare(both: JobResult, case: Training, what: str) -> None:
    for rank in range(4):
        stock: dict[str, Any] = both.values[rank][case.name]
        assert both.values[rank][plugin(case).name][what] == stock[what], f"rank {rank}"
        assert stock["steps"] == case.steps


def test_disabled_is_deepspeeds_own_engine(jobs: Jobs) -> None:
    result = jobs.run(engine_classes, world=1)
    assert result.values[0] == {"without": "PipelineEngine", "disabled": "PipelineEngine"}


def engine_classes() -> dict[str, str]:
    from tests.runtime.scenarios import build

    disabled = Training("disabled", 1, settings={"bamboo": {"enabled": False}})
    return {"without": type(build(Training("without", 1))).__name__, "disabled": type(build(disabled)).__name__}
