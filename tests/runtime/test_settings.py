"""Settings of the plugin that change or check what is computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_bamboo.errors import ConfigError
from deepspeed_bamboo.runtime.initialize import initialize_with
from deepspeed_bamboo.runtime.main import EXIT_JOB_FAILED, EXIT_USER_ERROR
from deepspeed_bamboo.runtime.stock.script_groups import ScriptGroups
from tests.runtime import models
from tests.runtime.jobs import Jobs
from tests.runtime.scenarios import SGD, Training, build, train

CLIP = 0.05


@pytest.fixture(scope="module")
def updates(jobs: Jobs) -> dict[str, list[float]]:
    """Norm of each stage's first update, divided by the learning rate, by setting."""
    result = jobs.run(update_norms, world=2)
    assert result.codes == [0, 0], result.transcript()
    return {key: [result.values[rank][key] for rank in (0, 1)] for key in result.values[0]}


def update_norms() -> dict[str, float]:
    return {setting: _update_norm(setting) for setting in ("stock", "global")}


def _update_norm(setting: str) -> float:
    settings = {"gradient_clipping": CLIP, "optimizer": SGD}
    case = Training(setting, 2, count=4, settings=settings, bamboo={"gradient_norm": setting}, faults=[])
    engine = build(case)
    before = [parameter.detach().clone() for parameter in engine.module.parameters()]
    engine.train_batch(models.micro_batches(models.vectors, pipeline=0, first_step=0, count=4))
    changes = [(old - new).reshape(-1) for old, new in zip(before, engine.module.parameters(), strict=True)]
    engine.close()
    return float(torch.cat(changes).norm() / SGD["params"]["lr"])


def test_stocks_rule_clips_by_the_norm_of_stage_0(updates: dict[str, list[float]]) -> None:
    assert updates["stock"][0] == pytest.approx(CLIP, rel=1e-3)
    assert updates["stock"][1] > CLIP


def test_global_norm_covers_all_stages(updates: dict[str, list[float]]) -> None:
    assert sum(norm**2 for norm in updates["global"]) ** 0.5 == pytest.approx(CLIP, rel=1e-3)


def test_equal_shadows_pass_the_check(jobs: Jobs) -> None:
    case = Training("checked", 2, settings=_FP16, bamboo={"debug_check_shadows": 1}, faults=[])
    result = jobs.run(train, world=2, training=case)
    assert result.codes == [0, 0], result.transcript()


def test_a_different_shadow_is_named(jobs: Jobs) -> None:
    result = jobs.run(train_with_corrupted_shadow, world=2)
    assert set(result.codes) <= {EXIT_USER_ERROR, EXIT_JOB_FAILED}, result.transcript()
    raised = result.codes.index(EXIT_USER_ERROR)
    assert "0.1 parameter 4.linear.bias: worker w1 has" in result.outputs[raised]


def train_with_corrupted_shadow() -> None:
    engine = build(Training("corrupted", 2, bamboo={"debug_check_shadows": 1}, faults=[]))
    for replica in engine.host.shadows.values():
        if replica.coordinate.stage == 1:
            dict(replica.module.named_parameters())["4.linear.bias"].data[0] += 1
    engine.train_batch(models.micro_batches(models.vectors, pipeline=0, first_step=0, count=4))


_FP16: dict[str, Any] = {"fp16": {"enabled": True, "initial_scale_power": 26}}


def test_a_section_that_the_environment_names_counts_where_the_configuration_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stock(model: Any = None, config: Any = None) -> str:
        return "plain DeepSpeed"

    named, model = tmp_path / "named.json", torch.nn.Linear(1, 1)
    named.write_text('{"bamboo": {}}')

    def made(config: dict[str, Any]) -> Any:
        return initialize_with(stock, ScriptGroups(), model=model, config=config)

    assert made({"train_batch_size": 1}) == "plain DeepSpeed"
    monkeypatch.setenv("BAMBOO_CONFIG", str(named))
    with pytest.raises(ConfigError, match="no PipelineModule"):
        made({"train_batch_size": 1})
    assert made({"train_batch_size": 1, "bamboo": {"enabled": False}}) == "plain DeepSpeed", "the script's own counts"
