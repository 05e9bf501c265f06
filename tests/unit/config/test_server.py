"""The flags of the engine openai: what is refused, and what follows from them."""

from __future__ import annotations

import pytest

from quartet.config import PpoConfig, RolloutServeConfig
from quartet.config.derive import push_backend
from quartet.config.load import build
from quartet.config.machine import Machine
from quartet.config.placement import places
from quartet.config.runnable import obstacles
from quartet.config.validate import problems

CPU = Machine(num_gpus=0)
PPO = {
    "actor.model_name_or_path": "org/policy",
    "reward.remote_url": "rewards.py",
    "data.prompt_dataset": "org/prompts",
    "algo.advantage.estimator": "reinforce",
    "rollout.engine": "openai",
    "rollout.server_url": "http://127.0.0.1:8000",
}
SERVE = {
    "rollout.model_name_or_path": "org/policy",
    "rollout.engine": "openai",
    "rollout.server_url": "https://10.0.0.1/v1",
}


def wrong(cls, values):
    return [error.info.field for error in problems(build(cls, values, {}))]


def test_what_is_whole():
    assert wrong(PpoConfig, PPO) == []
    assert wrong(RolloutServeConfig, SERVE) == []
    assert wrong(RolloutServeConfig, SERVE | {"rollout.server_weights": "http://h:1/load"}) == []


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"rollout.server_url": None}, "rollout.server_url"),
        ({"rollout.server_url": "127.0.0.1:8000"}, "rollout.server_url"),
        ({"rollout.server_url": "http://a:1,http://b:2"}, "rollout.server_url"),
        ({"rollout.engine": "transformers"}, "rollout.server_url"),
        ({"rollout.server_weights": "somehow"}, "rollout.server_weights"),
    ],
)
def test_what_is_refused_of_both(changed, field):
    assert wrong(PpoConfig, PPO | changed) == [field]
    assert wrong(RolloutServeConfig, SERVE | changed) == [field]


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"vllm.num_engines": 2}, "rollout.server_url"),
        ({"push.backend": "gloo"}, "push.backend"),
        ({"rollout.server_weights": "none"}, "rollout.server_weights"),
        ({"train.full_determinism_enable": True}, "train.full_determinism_enable"),
        ({"vllm.enable_sleep": True, "train.colocate_all": True}, "vllm.enable_sleep"),
    ],
)
def test_what_is_refused_of_a_run(changed, field):
    assert field in wrong(PpoConfig, PPO | changed)


def test_the_services_at_an_address_have_their_own_server():
    assert (
        wrong(PpoConfig, PPO | {"rollout.address": "127.0.0.1:1", "rollout.server_url": None}) == []
    )


def test_weights_travel_as_files():
    for extra in ({}, {"vllm.sync_backend": "gloo"}):
        assert push_backend(build(PpoConfig, PPO | extra, {}), CPU)[0] == "file"


def test_it_takes_no_gpu_of_the_trainers():
    found = places(build(PpoConfig, PPO, {}), Machine(num_gpus=8))
    assert [place.gpus for place in found if place.role == "rollout"] == [()]


def test_devices_are_the_servers():
    config = build(RolloutServeConfig, SERVE | {"vllm.tensor_parallel_size": 2}, {})
    fields = [error.info.field for error in obstacles(config, CPU)]
    assert "vllm.tensor_parallel_size" in fields
