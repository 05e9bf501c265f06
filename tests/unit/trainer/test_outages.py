"""What is advised when a service is gone."""

from dataclasses import replace

import pytest

from quartet.config import PpoConfig, SftConfig
from quartet.trainer.outages import longer_wait, way_on, what_is_left


@pytest.mark.parametrize("config", [PpoConfig(), SftConfig()], ids=["ppo", "sft"])
def test_a_run_with_checkpoints_can_go_on(config):
    without = way_on(config)
    assert "begin anew" in without
    kept = replace(config, ckpt=replace(config.ckpt, save_steps=10))
    assert way_on(kept) == "start it again and resume with --ckpt.load_enable"
    # Models in Hugging Face format alone are nothing to go on from.
    assert way_on(replace(kept, ckpt=replace(kept.ckpt, disable_ds=True))) == without


def test_the_flag_that_sets_the_limit():
    assert longer_wait("launch.connect_timeout", 60.0).startswith(
        "--launch.connect_timeout, now 60"
    )


def test_what_outlives_an_interrupted_run():
    assert what_is_left(SftConfig()) == "no service was left behind"
    mixed = replace(
        PpoConfig(), rollout=replace(PpoConfig().rollout, address="127.0.0.1:1,127.0.0.1:2")
    )
    assert what_is_left(mixed) == (
        "no service was left behind; left running, as they have an address: "
        "rollout at 127.0.0.1:1, 127.0.0.1:2"
    )
