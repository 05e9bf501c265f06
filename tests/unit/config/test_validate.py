"""Every rule between values: the line that breaks it, and the field that the error names."""

from __future__ import annotations

from typing import Any

import pytest

from quartet import config
from quartet.config.aliases import canonical_name
from quartet.config.load import build, load
from quartet.config.tree import leaves
from quartet.config.validate import problems, validate
from quartet.errors import ConfigError

PPO = (
    "--actor.model_name_or_path org/policy --reward.model_name_or_path org/reward "
    "--data.prompt_dataset org/prompts "
)
AGENT = (
    "--actor.model_name_or_path org/policy --data.prompt_dataset org/prompts "
    "--train.agent_func_path "
)
RULE = (
    "--actor.model_name_or_path org/policy --reward.remote_url rewards.py "
    "--data.prompt_dataset org/prompts --algo.advantage.estimator group_norm "
    "--rollout.n_samples_per_prompt 4 "
)
WHOLE = "--ds.zero_stage 0 --ds.param_dtype fp32"
SFT = "--model.model_name_or_path org/lm --data.dataset org/data --data.output_key answer "
PAIRS = "--model.model_name_or_path org/lm --data.dataset org/pairs "
LEARNER = "--learner.model_name_or_path org/lm "
REWARD = "--reward.model_name_or_path org/rm "

CLASSES = {
    "ppo": config.PpoConfig,
    "sft": config.SftConfig,
    "rm": config.RmConfig,
    "dpo": config.DpoConfig,
    "rollout": config.RolloutServeConfig,
    "reward": config.RewardServeConfig,
    "ref": config.RefServeConfig,
    "learner": config.LearnerServeConfig,
}


def found(command: str, line: str) -> list[ConfigError]:
    """What is wrong with a line. Read without tyro, which would take most of the time."""
    cls = CLASSES[command]
    values: dict[str, Any] = {}
    name = ""
    for word in line.split():
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = canonical_name(name, cls)
            turned_off = name.replace(".no_", ".")
            name, default = (turned_off, False) if name not in leaves(cls) else (name, True)
            values[name] = [value] if equals else default
        elif isinstance(values[name], bool):
            values[name] = [word]
        else:
            values[name].append(word)
    for name, value in values.items():
        if isinstance(value, list) and not leaves(cls)[name].is_sequence:
            values[name] = value[0]
    return list(problems(build(cls, values, {})))


@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("ppo", PPO),
        ("ppo", RULE),
        ("ppo", PPO + "--algo.kl.init_coef 0"),
        ("ppo", PPO + "--algo.advantage.is_correction_level token --algo.advantage.lambd 0.95"),
        ("ppo", PPO + "--train.batch_size 100 --rollout.batch_size 128"),  # explained, not refused
        ("ppo", RULE + "--algo.advantage.is_correction_level seq "
         "--algo.advantage.is_correction_gating tv --algo.advantage.is_correction_threshold 0.1"),
        ("ppo", PPO + "--rollout.address h:1,[::1]:2,unix:/x,dns:///name:3 --rpc.insecure"),
        ("ppo", PPO.replace("--reward.model_name_or_path org/reward", "--reward.address [::1]:1")),
        ("ppo", RULE.replace("rewards.py", "http://a/x,https://b/y")),
        ("sft", SFT),
        ("sft", SFT.replace("--data.output_key answer", "--data.apply_chat_template")),
        ("sft", SFT.replace("--data.output_key answer", "--model.pretrain_mode_enable")),
        ("sft", SFT + "--data.dataset a,b --data.dataset_probs 0.25,0.75"),
        ("rm", PAIRS),
        ("rm", PAIRS + "--model.loss_type logexp"),
        ("dpo", PAIRS),
        ("dpo", PAIRS + "--model.ipo_enable"),
        ("rollout", "--rollout.model_name_or_path org/lm"),
        ("ref", "--ref.model_name_or_path org/lm"),
        ("learner", LEARNER + "--learner.head value --learner.new_head"),
        ("reward", REWARD + "--reward.normalize_enable"),
        ("reward", "--reward.remote_url rewards.py"),
    ],
)  # fmt: skip
def test_accepted(command: str, line: str):
    assert [str(problem) for problem in found(command, line)] == []


CASES = [
    # models, data, rewards
    ("ppo", "--data.prompt_dataset d --reward.remote_url r.py", "actor.model_name_or_path"),
    ("sft", "--data.dataset d --data.output_key a", "model.model_name_or_path"),
    ("ppo", "--actor.model_name_or_path m --reward.remote_url r.py", "data.prompt_dataset"),
    ("ppo", PPO + "--data.prompt_dataset ,", "data.prompt_dataset"),
    ("rm", "--model.model_name_or_path m", "data.dataset"),
    ("ppo", "--actor.model_name_or_path m --data.prompt_dataset d", "reward.model_name_or_path"),
    ("ppo", PPO + "--reward.remote_url r.py", "reward.remote_url"),
    ("ppo", PPO + "--reward.model_name_or_path a,b", "reward.model_name_or_path"),
    ("ppo", RULE + "--reward.remote_url a.py,b.py", "reward.remote_url"),
    ("ppo", RULE + "--reward.remote_url a.py,http://b", "reward.remote_url"),
    ("ppo", RULE + "--reward.remote_url agent", "reward.remote_url"),
    ("ppo", RULE + "--reward.address localhost:1", "reward.remote_url"),
    ("ppo", RULE + "--reward.normalize_enable", "reward.normalize_enable"),
    ("ppo", PPO + "--data.prompt_probs 1", None),
    ("ppo", PPO + "--data.prompt_probs 0.5,0.5", "data.prompt_probs"),
    ("sft", SFT + "--data.dataset a,b --data.dataset_probs 0.5,0.6", "data.dataset_probs"),
    ("sft", SFT + "--data.dataset a,b --data.dataset_probs=-0.5,1.5", "data.dataset_probs"),
    ("sft", SFT + "--data.dataset a,b --data.dataset_probs half,half", "data.dataset_probs"),
    ("sft", SFT + "--data.input_template User:", "data.input_template"),
    ("sft", SFT + r"--data.input_template User:{}\n", "data.input_template"),
    ("ppo", PPO + r"--data.input_template {}\n", "data.input_template"),
    ("ppo", PPO + r"--data.input_template {}\n --data.apply_chat_template", None),
    # SFT, RM, DPO
    ("sft", SFT + "--data.multiturn", "data.multiturn"),
    ("sft", SFT + "--data.multiturn --data.apply_chat_template --model.pretrain_mode_enable",
     "data.multiturn"),
    ("sft", "--model.model_name_or_path m --data.dataset d", "data.output_key"),
    ("rm", PAIRS + "--model.loss_type hinge", "model.loss_type"),
    ("rm", PAIRS + "--model.loss_type logexp --model.margin_loss_enable",
     "model.margin_loss_enable"),
    ("dpo", PAIRS + "--model.ipo_enable --model.label_smoothing 0.1", "model.label_smoothing"),
    ("sft", SFT + "--optim muon " + WHOLE, "max_norm"),
    ("sft", SFT + "--optim muon --max_norm 0 " + WHOLE, None),
    ("sft", SFT + "--optim muon --max_norm 0 --muon.ns_steps 6 --muon.no_nesterov " + WHOLE, None),
    ("sft", SFT + "--optim muon --max_norm 0 --ds.param_dtype fp32", "optim"),
    ("sft", SFT + "--optim muon --max_norm 0 --ds.zero_stage 0", "optim"),
    ("sft", SFT + "--optim muon --max_norm 0 --ds.tensor_parallel_size 2 " + WHOLE, "optim"),
    ("sft", SFT + "--optim muon --max_norm 0 --ds.adam_offload " + WHOLE, "optim"),
    ("sft", SFT + "--lr_scheduler cosin", "lr_scheduler"),
    ("ppo", PPO + "--actor.lr_scheduler reduce_lr_on_plateau", "actor.lr_scheduler"),
    ("ppo", PPO + "--critic.lr_scheduler x", "critic.lr_scheduler"),
    ("ppo", PPO + "--critic.optim muon " + WHOLE, "critic.max_norm"),
    ("ppo", PPO + "--actor.optim muon --actor.max_norm 0", "actor.optim"),
    # advantages and the critic
    *[
        ("ppo", PPO + f"--algo.advantage.estimator {name}", "rollout.n_samples_per_prompt")
        for name in ("rloo", "reinforce_baseline", "group_norm", "dr_grpo")
    ],
    *[
        ("ppo", PPO + f"--algo.advantage.estimator {name}", None)
        for name in ("reinforce", "flash_reinforce")
    ],
    ("ppo", RULE + "--algo.advantage.gamma 0.9", "algo.advantage.gamma"),
    ("ppo", PPO + "--algo.advantage.gamma 0.9", None),
    ("ppo", RULE + "--critic.freezing_steps 2", "critic.freezing_steps"),
    ("ppo", PPO + "--critic.freezing_steps 2", None),
    ("ppo", RULE + "--critic.save_value_network", "critic.save_value_network"),
    ("ppo", RULE + "--critic.address localhost:1", "critic.address"),
    # correction
    ("ppo", PPO + "--algo.advantage.is_correction_threshold 1 2 3",
     "algo.advantage.is_correction_threshold"),
    ("ppo", PPO + "--algo.advantage.is_correction_threshold 5 0.5",
     "algo.advantage.is_correction_threshold"),
    ("ppo", PPO + "--algo.advantage.is_correction_level seq "
     "--algo.advantage.is_correction_mode clip", "algo.advantage.is_correction_mode"),
    ("ppo", PPO + "--algo.advantage.is_correction_level token "
     "--algo.advantage.is_correction_mode clip --algo.advantage.is_correction_gating tv "
     "--algo.advantage.is_correction_threshold 1", "algo.advantage.is_correction_mode"),
    ("ppo", PPO + "--algo.advantage.is_correction_level token "
     "--algo.advantage.is_correction_gating binary_kl", "algo.advantage.is_correction_threshold"),
    ("ppo", PPO + "--algo.advantage.is_correction_level token --rollout.top_p 0.9",
     "algo.advantage.is_correction_level"),
    ("ppo", PPO + "--algo.advantage.is_correction_level seq --rollout.top_k 50",
     "algo.advantage.is_correction_level"),
    ("ppo", PPO + "--algo.advantage.is_correction_level seq --actor.policy_loss_type gspo", None),
    ("ppo", PPO + "--actor.policy_loss_type cispo --actor.loss_agg_mode seq-mean-token-sum", None),
    ("ppo", PPO + "--actor.loss_agg_mode seq-mean-token-sum-norm --actor.loss_agg_length 0",
     "actor.loss_agg_length"),
    ("ppo", PPO + "--rollout.top_p 0.9", None),
    # KL
    ("ppo", PPO + "--algo.kl.unbiased_gradient", "algo.kl.unbiased_gradient"),
    ("ppo", PPO + "--algo.kl.unbiased_gradient --algo.kl.use_loss", None),
    ("ppo", PPO + "--algo.kl.init_coef 0 --algo.kl.target 6", "algo.kl.target"),
    ("ppo", PPO + "--algo.kl.init_coef 0 --algo.kl.use_loss", "algo.kl.use_loss"),
    ("ppo", PPO + "--algo.kl.init_coef 0 --ref.address localhost:1", "ref.address"),
    # rewards
    ("ppo", PPO + "--reward.clip_range 1 1", "reward.clip_range"),
    ("ppo", PPO + "--reward.overlong_buffer_len 300 --rollout.max_new_tokens 256",
     "reward.overlong_buffer_len"),
    ("ppo", PPO + "--reward.overlong_buffer_len 4096", "reward.overlong_buffer_len"),
    ("ppo", PPO + "--reward.overlong_buffer_len 64 --rollout.max_new_tokens 256", None),
    # sampling and batches
    ("ppo", PPO + "--rollout.max_new_tokens 2048", "rollout.max_new_tokens"),
    ("ppo", PPO + "--rollout.vllm_generate_batch_size 2048", "rollout.vllm_generate_batch_size"),
    ("ppo", PPO + "--rollout.vllm_generate_batch_size 2048 --train.async_enable", None),
    ("ppo", PPO + "--algo.dynamic_filtering_range 1 0", "algo.dynamic_filtering_range"),
    ("ppo", PPO + "--algo.dynamic_filtering_enable", "rollout.n_samples_per_prompt"),
    ("ppo", PPO + "--train.batch_size 129 --rollout.batch_size 128", "train.batch_size"),
    ("ppo", PPO + "--train.dynamic_batch_enable --train.max_tokens_per_gpu 1024",
     "train.max_tokens_per_gpu"),
    ("ppo", PPO + "--train.dynamic_batch_enable --rollout.max_tokens_per_gpu 1024",
     "rollout.max_tokens_per_gpu"),
    ("ppo", PPO + "--train.max_tokens_per_gpu 1024", None),
    # modes
    ("ppo", PPO + "--train.partial_rollout_enable", "train.partial_rollout_enable"),
    ("ppo", PPO + "--train.async_enable --vllm.enable_sleep --train.colocate_all",
     "vllm.enable_sleep"),
    ("ppo", RULE + "--train.agent_func_path a.py", "reward.remote_url"),
    ("ppo", AGENT + "a.py", None),
    ("ppo", AGENT + "a.txt", "train.agent_func_path"),
    ("ppo", AGENT + "a.py --reward.address h:1", "reward.address"),
    ("ppo", AGENT + "a.py --reward.remote_url agent", "reward.remote_url"),
    ("ppo", AGENT + "a.py --reward.model_name_or_path m", "reward.model_name_or_path"),
    ("ppo", AGENT + "a.py --reward.normalize_enable", "reward.normalize_enable"),
    ("ppo", PPO + "--data.max_images_per_prompt 1", "data.max_images_per_prompt"),
    ("ppo", RULE + "--data.max_images_per_prompt 1 --ds.packing_samples",
     "data.max_images_per_prompt"),
    ("ppo", PPO + "--eval.steps 10", "eval.steps"),
    ("ppo", PPO + "--ckpt.best_metric_key eval_default_pass1", "ckpt.best_metric_key"),
    ("ppo", PPO + "--ckpt.best_metric_key none", None),
    ("ppo", PPO + "--ckpt.best_metric_key x --eval.dataset d --eval.steps 1", None),
    ("ppo", PPO + "--ckpt.best_metric_key x --eval.dataset d --eval.steps 1 --ckpt.disable_ds",
     "ckpt.best_metric_key"),
    # placement and parallelism
    ("ppo", PPO + "--train.colocate_all --vllm.num_engines 4", "vllm.num_engines"),
    ("ppo", PPO + "--train.colocate_all --vllm.num_engines 8", None),
    ("ppo", PPO + "--train.colocate_all --vllm.num_engines 8 --ref.num_gpus_per_node 4",
     "ref.num_gpus_per_node"),
    ("ppo", PPO + "--train.colocate_all --vllm.num_engines 8 --critic.num_nodes 2",
     "critic.num_gpus_per_node"),
    ("ppo", PPO + "--train.colocate_actor_ref --ref.num_gpus_per_node 4", "ref.num_gpus_per_node"),
    ("ppo", PPO + "--train.colocate_actor_ref --ref.num_gpus_per_node 4 --algo.kl.init_coef 0",
     None),
    ("ppo", PPO + "--train.colocate_critic_reward --reward.num_gpus_per_node 4",
     "reward.num_gpus_per_node"),
    ("ppo", PPO + "--vllm.enable_sleep", "vllm.enable_sleep"),
    ("ppo", PPO + "--ds.enable_sleep", "ds.enable_sleep"),
    ("ppo", PPO + "--train.async_enable --ds.enable_sleep --train.colocate_all",
     "ds.enable_sleep"),
    ("ppo", PPO + "--train.max_staleness 2", "train.max_staleness"),
    ("ppo", PPO + "--train.max_staleness 2 --train.async_enable", None),
    ("ppo", PPO + "--train.async_enable --train.full_determinism_enable",
     "train.full_determinism_enable"),
    ("ppo", PPO + "--vllm.sync_backend mpi", "vllm.sync_backend"),
    ("ppo", PPO + "--push.backend ipc", None),
    ("ppo", PPO + "--ds.ring_attn_size 3 --ds.packing_samples", "ds.ring_attn_size"),
    ("ppo", PPO + "--ds.tensor_parallel_size 3", "ds.tensor_parallel_size"),
    ("sft", SFT + "--ds.tensor_parallel_size 2 --learner.num_ranks 3", "ds.tensor_parallel_size"),
    ("sft", SFT + "--ds.ring_attn_size 2", "ds.ring_attn_size"),
    ("sft", SFT + "--ds.ring_attn_size 2 --ds.packing_samples", None),
    (
        "sft",
        SFT + "--ds.ring_attn_size 2 --ds.packing_samples --ds.attn_implementation eager",
        "ds.attn_implementation",
    ),
    ("sft", SFT + "--ds.ring_attn_head_stride 2", "ds.ring_attn_head_stride"),
    ("sft", SFT + "--ds.tensor_parallel_size 2 --learner.num_ranks 4", None),
    (
        "ppo",
        PPO + "--ds.tensor_parallel_size 2 --critic.num_gpus_per_node 3",
        "ds.tensor_parallel_size",
    ),
    ("sft", SFT + "--ds.zero_stage 3 --ds.zpg 2 --learner.num_ranks 3", "ds.zpg"),
    ("sft", SFT + "--ds.deepcompile", None),
    ("sft", SFT + "--ds.deepcompile --ds.zero_stage 0", "ds.deepcompile"),
    ("sft", SFT + "--ds.deepcompile --ds.tensor_parallel_size 2", "ds.deepcompile"),
    ("sft", SFT + "--ds.deepcompile --ds.ring_attn_size 2 --ds.packing_samples", "ds.deepcompile"),
    ("sft", SFT + "--ds.deepcompile --ds.lora.rank 8", "ds.deepcompile"),
    ("sft", SFT + "--ds.zpg 2", "ds.zpg"),
    ("sft", SFT + "--ds.zpg 2 --ds.zero_stage 3", None),
    ("sft", SFT + "--ds.load_in_4bit --ds.lora.rank 8 --ds.param_dtype fp16", "ds.load_in_4bit"),
    ("sft", SFT + "--ds.load_in_4bit --ds.lora.rank 8 --ds.zero_stage 3", "ds.load_in_4bit"),
    ("sft", SFT + "--ds.load_in_4bit", "ds.load_in_4bit"),
    ("ppo", PPO + "--ds.load_in_4bit --ds.lora.rank 8", None),
    ("ppo", PPO + "--ds.lora.rank -1", "ds.lora.rank"),
    ("ppo", PPO + "--ds.lora.rank 8 --ds.lora.alpha 0", "ds.lora.alpha"),
    ("ppo", PPO + "--ds.lora.rank 8 --ds.lora.dropout 1", "ds.lora.dropout"),
    ("ppo", PPO + "--ds.lora.rank 8 --ds.lora.dropout -0.1", "ds.lora.dropout"),
    ("ppo", PPO + "--ds.lora.rank 8 --ds.lora.target_modules all-linear q_proj",
     "ds.lora.target_modules"),
    ("ppo", PPO + "--ds.lora.rank 8 --ds.lora.target_modules q_proj v_proj", None),
    ("ppo", PPO + "--ds.lora.rank 8 --ds.tensor_parallel_size 2", "ds.lora.rank"),
    ("ppo", PPO + "--ds.lora.rank 8 --critic.optim muon --critic.max_norm 0 --ds.zero_stage 0 "
     "--ds.param_dtype fp32", "critic.optim"),
    ("sft", SFT + "--ds.lora.rank 8 --optim muon --max_norm 0 --ds.zero_stage 0 "
     "--ds.param_dtype fp32", "optim"),
    ("learner", LEARNER + "--ds.load_in_4bit", "ds.load_in_4bit"),
    ("sft", SFT + "--ds.grad_accum_dtype float", "ds.grad_accum_dtype"),
    # checkpoints and addresses
    ("sft", SFT + "--ckpt.save_steps 5 --ckpt.disable_ds", "ckpt.save_steps"),
    ("sft", SFT + "--ckpt.save_steps 5 --ckpt.disable_ds --ckpt.save_hf", None),
    ("ppo", PPO + "--rollout.address localhost", "rollout.address"),
    ("ppo", PPO + "--rollout.address localhost:0", "rollout.address"),
    ("ppo", PPO + "--rollout.address localhost:99999", "rollout.address"),
    ("ppo", PPO + "--rollout.address file://rollouts.txt", "rollout.address"),
    ("ppo", PPO + "--rollout.address file:///etc/rollouts.txt,localhost:1", None),
    ("ppo", PPO + "--learner.address file:///etc/learner.txt", "learner.address"),
    ("ppo", PPO + "--rollout.address unix:", "rollout.address"),
    ("ppo", PPO + "--rollout.address ::1:7001", "rollout.address"),
    ("ppo", PPO + "--rollout.address far:7001", "rollout.address"),
    ("ppo", PPO + "--rollout.address far:7001 --rpc.insecure", None),
    ("ppo", PPO + "--learner.address localhost:1,localhost:2", "learner.address"),
    ("ppo", PPO + "--critic.address localhost:1,localhost:2", "critic.address"),
    # services
    ("rollout", "", "rollout.model_name_or_path"),
    ("ref", "", "ref.model_name_or_path"),
    ("learner", "", "learner.model_name_or_path"),
    ("reward", "", "reward.model_name_or_path"),
    ("reward", REWARD + "--reward.remote_url r.py", "reward.remote_url"),
    ("reward", "--reward.remote_url r.py --reward.normalize_enable", "reward.normalize_enable"),
    ("reward", REWARD + "--host 0.0.0.0", "rpc.host"),
    ("reward", REWARD + "--host 0.0.0.0 --rpc.insecure", None),
    ("learner", LEARNER + "--learner.new_head", "learner.new_head"),
    ("learner", LEARNER + "--learner.normalize_enable", "learner.normalize_enable"),
]  # fmt: skip


@pytest.mark.parametrize(("command", "line", "field"), CASES)
def test_rule(command: str, line: str, field: str | None):
    errors = found(command, line)
    if field is None:
        assert [str(error) for error in errors] == []
        return
    assert field in {error.info.field for error in errors}
    for error in errors:
        assert error.info.remedy, error
        assert str(error).startswith(("--", "rpc."))
        assert "\n" not in str(error)


def test_the_most_basic_first():
    with pytest.raises(ConfigError) as caught:
        validate(config.PpoConfig())
    assert caught.value.info.field == "actor.model_name_or_path"
    assert caught.value.exit_code == 2


def test_the_seeds_line_is_consistent(seed_line: list[str]):
    assert list(problems(load(config.PpoConfig, seed_line, environ={}).config)) == []


@pytest.mark.parametrize("name", ["a/b", "/tmp/x", "..", ".", ""])
def test_names_of_runs_that_are_no_folder(name: str):
    (error,) = problems(
        build(
            config.SftConfig,
            {
                "model.model_name_or_path": "org/lm",
                "data.dataset": "org/data",
                "data.output_key": "answer",
                "run.name": name,
            },
            {},
        )
    )
    assert error.info.field == "run.name"


@pytest.mark.parametrize("level", ["off", "token", "seq"])
@pytest.mark.parametrize("kind", ["ppo", "gspo", "cispo"])
@pytest.mark.parametrize(("top_p", "top_k"), [(1, -1), (0.9, -1), (1, 50), (0.5, 1)])
def test_a_correction_needs_the_whole_distribution(level: str, kind: str, top_p: float, top_k: int):
    """Refused in every way to combine them, before anything is started."""
    line = (
        f"{PPO} --algo.advantage.is_correction_level {level} --actor.policy_loss_type {kind} "
        f"--rollout.top_p {top_p} --rollout.top_k {top_k}"
    )
    fields = [error.info.field for error in found("ppo", line)]
    biased = level != "off" and (top_p, top_k) != (1, -1)
    assert fields == (["algo.advantage.is_correction_level"] if biased else [])
