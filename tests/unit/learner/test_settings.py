"""From the command line's configuration to the learner's settings."""

from __future__ import annotations

from dataclasses import replace

import pytest
from quartet_learner.settings import LearnerSettings, settings_from_config

from quartet.config import LearnerServeConfig
from quartet.config.ds import LoraConfig
from quartet.errors import ConfigError
from quartet.types import Head


def config_with(section: str = "ds", **changes) -> LearnerServeConfig:
    config = LearnerServeConfig()
    config = replace(config, learner=replace(config.learner, model_name_or_path="/a/model"))
    return replace(config, **{section: replace(getattr(config, section), **changes)})


def test_settings_travel_to_other_ranks_unchanged():
    settings = settings_from_config(config_with("learner", head="value", num_ranks=2))
    assert settings.head is Head.VALUE
    assert settings.param_dtype == "bfloat16"
    assert LearnerSettings.from_json(settings.to_json()) == settings


def test_the_ways_to_spread_a_model_reach_the_settings():
    settings = settings_from_config(
        config_with(
            tensor_parallel_size=2,
            ring_attn_size=3,
            ring_attn_head_stride=4,
            use_liger_kernel=True,
            deepcompile=True,
        )
    )
    assert (settings.layout(12).tensor_size, settings.layout(12).ring_size) == (2, 3)
    assert settings.layout(12).data_size == 2
    assert (settings.ring_head_stride, settings.use_liger_kernel, settings.deepcompile) == (
        4,
        True,
        True,
    )


def test_adapters_travel_too():
    lora = LoraConfig(rank=8, alpha=32, dropout=0.1, target_modules=("q_proj", "v_proj"))
    settings = settings_from_config(config_with("ds", lora=lora, load_in_4bit=True))
    assert (settings.lora_rank, settings.lora_alpha, settings.lora_dropout) == (8, 32, 0.1)
    assert settings.lora_targets == ("q_proj", "v_proj")
    assert settings.load_in_4bit
    assert LearnerSettings.from_json(settings.to_json()) == settings


@pytest.mark.parametrize(
    ("section", "changes", "field"),
    [
        ("learner", {"model_name_or_path": None}, "learner.model_name_or_path"),
        ("learner", {"num_ranks": 0}, "learner.num_ranks"),
        ("learner", {"freeze_visual_encoder": True}, "learner.freeze_visual_encoder"),
        ("ds", {"zero_stage": 4}, "ds.zero_stage"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(section, changes, field):
    with pytest.raises(ConfigError) as caught:
        settings_from_config(config_with(section, **changes))
    assert caught.value.info.field == field
    assert caught.value.info.remedy
