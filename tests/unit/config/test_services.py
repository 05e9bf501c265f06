from __future__ import annotations

import pytest

from quartet.config import (
    DpoConfig,
    LearnerServeConfig,
    PpoConfig,
    RefServeConfig,
    RewardServeConfig,
    RmConfig,
    RolloutServeConfig,
    SftConfig,
)
from quartet.config.ds import PpoDsConfig
from quartet.config.files import to_yaml
from quartet.config.load import build, from_yaml
from quartet.config.services import Role, serve_config_for
from quartet.config.validate import problems

PPO = build(
    PpoConfig,
    {
        "actor.model_name_or_path": "policy",
        "actor.gradient_checkpointing_enable": True,
        "reward.model_name_or_path": "judge",
        "reward.normalize_enable": True,
        "reward.timeout": 7.0,
        "rollout.micro_batch_size": 5,
        "rollout.max_num_sequences": 9,
        "vllm.tensor_parallel_size": 2,
        "ds.param_dtype": "fp32",
        "ds.zero_stage": 3,
        "ds.value_head_prefix": "head",
        "data.max_len": 77,
        "train.seed": 8,
        "train.full_determinism_enable": True,
        "learner.num_ranks": 2,
        "ref.offload": True,
    },
    {},
)


def test_each_engine_has_a_server_of_its_own_and_no_key_in_its_file():
    values = {
        "actor.model_name_or_path": "policy",
        "rollout.engine": "openai",
        "rollout.server_url": "http://a:1, http://b:2",
        "rollout.server_key": "k",
        "rollout.server_logprobs": "raw",
        "vllm.num_engines": 2,
    }
    config = build(PpoConfig, values, {})
    found = [serve_config_for("rollout", config, index) for index in range(2)]
    sections = [serve.rollout for serve in found if isinstance(serve, RolloutServeConfig)]
    assert [s.server_url for s in sections] == ["http://a:1", "http://b:2"]
    assert {s.server_logprobs for s in sections} == {"raw"}
    assert [list(problems(serve)) for serve in found] == [[], []]
    assert "server_key" not in to_yaml(found[0])
    assert "server_key" not in repr(config)


def test_learners_alone_have_quantised_weights_and_adapters():
    config = build(PpoConfig, {"ds.load_in_4bit": True, "ds.lora.rank": 8}, {})
    for role in ("learner", "critic"):
        ds = serve_config_for(role, config).ds
        assert isinstance(ds, PpoDsConfig)
        assert ds.load_in_4bit
        assert ds.lora.rank == 8
    assert not any(serve_config_for(r, config).ds.load_in_4bit for r in ("ref", "rollout"))
    judged = build(PpoConfig, {"ds.load_in_4bit": True, "reward.model_name_or_path": "j"}, {})
    assert not serve_config_for("reward", judged).ds.load_in_4bit


def test_learner():
    config = serve_config_for("learner", PPO)
    assert isinstance(config, LearnerServeConfig)
    assert (config.learner.model_name_or_path, config.learner.head) == ("policy", "lm")
    assert config.learner.num_ranks == 2
    assert config.learner.gradient_checkpointing_enable
    assert not config.learner.normalize_enable
    assert (config.ds.zero_stage, config.ds.param_dtype) == (3, "fp32")
    assert (config.data.max_len, config.train.seed) == (77, 8)
    assert config.train.full_determinism_enable


def test_critic_from_the_reward_model_keeps_its_head():
    config = serve_config_for("critic", PPO)
    assert isinstance(config, LearnerServeConfig)
    assert (config.learner.model_name_or_path, config.learner.head) == ("judge", "value")
    assert config.learner.normalize_enable
    assert not config.learner.new_head
    assert config.ds.value_head_prefix == "head"


def test_critic_from_the_policy_gets_a_new_head():
    config = serve_config_for("critic", build(PpoConfig, {"actor.model_name_or_path": "p"}, {}))
    assert isinstance(config, LearnerServeConfig)
    assert config.learner.model_name_or_path == "p"
    assert config.learner.new_head


def test_ref_reward_rollout():
    ref = serve_config_for("ref", PPO)
    assert isinstance(ref, RefServeConfig)
    assert (ref.ref.model_name_or_path, ref.ref.offload) == ("policy", True)
    reward = serve_config_for("reward", PPO)
    assert isinstance(reward, RewardServeConfig)
    assert (reward.reward.model_name_or_path, reward.reward.timeout) == ("judge", 7.0)
    assert (reward.batch_size, reward.ds.value_head_prefix) == (5, "head")
    rollout = serve_config_for("rollout", PPO)
    assert isinstance(rollout, RolloutServeConfig)
    assert rollout.rollout.model_name_or_path == "policy"
    assert rollout.rollout.max_num_sequences == 9
    assert rollout.vllm.tensor_parallel_size == 2
    assert rollout.ds.param_dtype == "fp32"


def test_offline_methods():
    model = {"model.model_name_or_path": "m"}
    sft = serve_config_for("learner", build(SftConfig, model, {}))
    rm = serve_config_for("learner", build(RmConfig, model | {"ds.value_head_prefix": "h"}, {}))
    assert isinstance(sft, LearnerServeConfig)
    assert isinstance(rm, LearnerServeConfig)
    assert (sft.learner.head, rm.learner.head) == ("lm", "reward")
    assert rm.ds.value_head_prefix == "h"
    ref = serve_config_for("ref", build(DpoConfig, model, {}))
    assert isinstance(ref, RefServeConfig)
    assert ref.ref.model_name_or_path == "m"


@pytest.mark.parametrize("role", ["learner", "critic", "ref", "reward", "rollout"])
def test_what_the_launcher_writes_is_read_back_and_valid(role: Role):
    config = serve_config_for(role, PPO)
    again = from_yaml(type(config), to_yaml(config))
    assert again == config
    assert list(problems(again)) == []


def test_services_export_metrics_on_ports_of_their_own_when_the_trainer_does():
    assert serve_config_for("rollout", PPO).metrics.port is None
    flags = {"metrics.port": 9100, "metrics.host": "::1"}
    serve = serve_config_for("rollout", build(PpoConfig, flags, {}))
    assert (serve.metrics.port, serve.metrics.host) == (0, "::1")


def test_a_method_without_the_role():
    with pytest.raises(ValueError, match="SftConfig has no rollout service"):
        serve_config_for("rollout", SftConfig())
