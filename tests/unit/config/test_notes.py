from __future__ import annotations

import pytest

from quartet.config import DpoConfig, PpoConfig, SftConfig
from quartet.config.load import build
from quartet.config.machine import Machine
from quartet.config.notes import notes

EIGHT = Machine(num_gpus=8, has_vllm=True, has_flash_attention=True)
CPU = Machine()

CASES = [
    (PpoConfig, {}, "flash_attention_2 needs a GPU, so sdpa is used"),
    (PpoConfig, {}, "bf16 is slow and coarse on a CPU"),
    (PpoConfig, {"actor.model_name_or_path": "a/b"}, "a name on the Hugging Face hub"),
    (PpoConfig, {"train.batch_size": 100}, "the last optimizer step of each pass has 24"),
    (PpoConfig, {"train.batch_size": 1, "learner.num_ranks": 2}, "some ranks stand idle"),
    (PpoConfig, {"reward.model_name_or_path": "r"}, "the critic starts from r"),
    (
        PpoConfig,
        {"algo.advantage.estimator": "rloo", "critic.value_clip": 0.1},
        "critic.*: rloo has no critic",
    ),
    (
        PpoConfig,
        {"algo.advantage.estimator": "rloo", "algo.advantage.lambd": 0.9},
        "only gae has a lambda",
    ),
    (
        PpoConfig,
        {"algo.advantage.estimator": "rloo", "algo.advantage.no_std_norm": True},
        "rloo does not whiten",
    ),
    (PpoConfig, {"algo.kl.init_coef": 0}, "there is no reference model"),
    (SftConfig, {"ds.lora.alpha": 32}, "ds.lora.alpha: no effect without --ds.lora.rank"),
    (
        PpoConfig,
        {"ds.lora.rank": 8, "ds.lora.dropout": 0.1},
        "ratios scatter around 1",
    ),
    (PpoConfig, {"ds.lora.rank": 8, "ds.load_in_4bit": True}, "the reference is not quantised"),
    (PpoConfig, {"algo.kl.use_loss": True}, "k1 has a gradient of mean 0"),
    (PpoConfig, {"algo.kl.estimator": "k3"}, "in the reward k1 is unbiased, k3 is not"),
    (PpoConfig, {"actor.policy_loss_type": "gspo"}, "gspo takes the mean over sequences"),
    (
        PpoConfig,
        {"actor.policy_loss_type": "gspo", "algo.advantage.is_correction_level": "token"},
        "gspo takes its ratio to the rollout engine's",
    ),
    (
        PpoConfig,
        {"actor.policy_loss_type": "cispo", "actor.dual_clip": 3.0},
        "actor.dual_clip: no effect on cispo",
    ),
    (
        PpoConfig,
        {"actor.loss_agg_length": 8},
        "only seq-mean-token-sum-norm has a length",
    ),
    (PpoConfig, {"algo.advantage.is_correction_gating": "tv"}, "the correction is off"),
    (
        PpoConfig,
        {"train.colocate_all": True, "train.colocate_critic_reward": True},
        "colocate_all shares all GPUs already",
    ),
    (
        PpoConfig,
        {"algo.dynamic_filtering_mean_only": True},
        "no effect without --algo.dynamic_filtering_enable",
    ),
    (PpoConfig, {"train.async_queue_size": 2}, "no effect without --train.async_enable"),
    (PpoConfig, {"train.ema_beta": 0.9}, "no effect without --train.enable_ema"),
    (PpoConfig, {"train.agent_timeout": 9.0}, "no effect without --train.agent_func_path"),
    (PpoConfig, {"algo.kl.horizon": 9}, "no effect without --algo.kl.target"),
    (
        PpoConfig,
        {"reward.overlong_penalty_factor": 0.5},
        "no effect without --reward.overlong_buffer_len",
    ),
    (PpoConfig, {"eval.dataset": "a/b"}, "PPO evaluates only with --eval.steps N"),
    (PpoConfig, {"vllm.enforce_eager": True}, "no effect on the engine transformers"),
    (
        PpoConfig,
        {"vllm.enforce_eager": True, "rollout.address": "localhost:1"},
        "the services at --rollout.address have their own",
    ),
    (PpoConfig, {"vllm.extra": ("block_size=32",)}, "no effect on the engine transformers"),
    (
        PpoConfig,
        {"rollout.python": "python", "rollout.address": "localhost:1"},
        "rollout.python: the services at --rollout.address have their own",
    ),
    (
        PpoConfig,
        {"data.apply_chat_template": True, "data.input_template": "{}"},
        "the chat template takes its place",
    ),
    (SftConfig, {"data.tokenizer_chat_template": "x"}, "no effect without --data.apply_chat"),
    (
        SftConfig,
        {"model.pretrain_mode_enable": True, "data.output_key": "x"},
        "data.output_key: raw text",
    ),
    (DpoConfig, {}, "the model as it is at the start"),
    (
        PpoConfig,
        {"train.dynamic_batch_enable": True, "train.micro_batch_size": 2},
        "micro-batches are filled by tokens",
    ),
    (PpoConfig, {"train.max_tokens_per_gpu": 9}, "no effect without --train.dynamic_batch"),
    (
        PpoConfig,
        {"ref.address": "h:1", "ref.num_gpus_per_node": 2},
        "the service at h:1 has its own GPUs",
    ),
    (
        PpoConfig,
        {"reward.address": "h:1", "reward.model_name_or_path": "r"},
        "it only starts the critic",
    ),
]


@pytest.mark.parametrize(("cls", "values", "text"), CASES)
def test_note(cls: type, values: dict[str, object], text: str):
    said = "\n".join(notes(build(cls, values, {}), CPU))
    assert text in said


ELSEWHERE: dict[str, object] = {
    f"{role}.address": f"localhost:{7001 + number}"
    for number, role in enumerate(("rollout", "reward", "ref", "learner", "critic"))
}


def test_what_is_in_use_is_not_called_idle():
    values = {"train.async_enable": True, "train.async_queue_size": 2}
    assert "train.async_queue_size" not in "\n".join(notes(build(PpoConfig, values, {}), CPU))


@pytest.mark.parametrize(("bound", "noted"), [(None, True), (1, True), (0, False)])
def test_samples_in_turn_are_not_called_older(bound: int | None, noted: bool):
    values = {"train.async_enable": True, "train.max_staleness": bound}
    said = "\n".join(notes(build(PpoConfig, values, {}), CPU))
    assert ("samples may be of older weights" in said) == noted


def test_nothing_is_said_of_services_that_are_not_started_here():
    values = ELSEWHERE | {"actor.model_name_or_path": "."}
    assert list(notes(build(PpoConfig, values, {}), CPU)) == []
    values |= {"ds.zero_stage": 3, "ds.param_dtype": "fp32", "ds.trust_remote_code": True}
    assert list(notes(build(PpoConfig, values, {}), CPU)) == [
        "ds.param_dtype, ds.zero_stage: no effect on services with an address."
    ]
    one_here = "\n".join(notes(build(PpoConfig, ELSEWHERE | {"ref.address": None}, {}), CPU))
    assert "so sdpa is used" in one_here
    assert "the critic starts from" not in one_here


def test_a_reward_model_beside_addresses_has_no_effect():
    said = list(notes(build(PpoConfig, ELSEWHERE | {"reward.model_name_or_path": "r"}, {}), CPU))
    assert said == [
        "reward.model_name_or_path: the service at --reward.address has its own; it has no effect."
    ]


def test_a_plain_line_on_gpus_needs_few_words():
    config = build(PpoConfig, {"reward.model_name_or_path": "r"}, {})
    assert list(notes(config, EIGHT)) == ["critic.model_name_or_path: the critic starts from r."]
