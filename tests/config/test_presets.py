"""Every file in configs/ is a configuration that DeepSpeed and the plugin take."""

from __future__ import annotations

from pathlib import Path

import pytest
from deepspeed.runtime.config import DeepSpeedConfig

from deepspeed_bamboo.config.requirements import ModelKind, validate_deepspeed_settings
from deepspeed_bamboo.config.section import load_bamboo_section, load_deepspeed_settings

PRESETS = sorted((Path(__file__).parent.parent.parent / "configs").glob("*.json"))


def test_there_are_presets() -> None:
    assert "cpu-demo.json" in [preset.name for preset in PRESETS]


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.name)
class TestPreset:
    def test_the_plugin_takes_it(self, preset: Path) -> None:
        config = load_bamboo_section(preset)
        assert config is not None
        assert config.enabled

    def test_deepspeed_takes_it(self, preset: Path) -> None:
        config = DeepSpeedConfig(str(preset))
        assert config.train_batch_size == config.train_micro_batch_size_per_gpu * config.gradient_accumulation_steps

    def test_stages_can_be_rebuilt_from_it(self, preset: Path) -> None:
        validate_deepspeed_settings(
            load_deepspeed_settings(preset),
            model=ModelKind.PIPELINE,
            model_name="PipelineModule",
            stages=4,
            world_size=4,
        )

    def test_it_says_how_it_clips(self, preset: Path) -> None:
        # DeepSpeed's default changed from "not at all" to 1.0 between versions.
        assert "gradient_clipping" in load_deepspeed_settings(preset)

    def test_it_opens_with_what_it_is_for(self, preset: Path) -> None:
        assert preset.read_text(encoding="utf-8").startswith("// ")
