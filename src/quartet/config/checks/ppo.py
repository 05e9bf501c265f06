"""The algorithm of PPO: advantages, losses, KL, rewards, sampling, batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from quartet.config.checks.server import check_served_run
from quartet.config.derive import (
    correction_band,
    longest_answer,
    needs_critic,
    needs_groups,
    needs_ref,
    samples_per_rollout,
    split_list,
    uses_agent,
)
from quartet.config.methods import PpoConfig
from quartet.config.rewardparts import check_parts, targets_of
from quartet.config.tree import wrong
from quartet.errors import ConfigError


def check_advantages(config: PpoConfig) -> Iterator[ConfigError]:
    """Estimator, group size, discount and critic."""
    advantage, estimator = config.algo.advantage, config.algo.advantage.estimator
    if needs_groups(config) and config.rollout.n_samples_per_prompt < 2:
        yield wrong(
            "rollout.n_samples_per_prompt",
            config.rollout.n_samples_per_prompt,
            f"{estimator} compares the samples of a prompt, so it needs at least 2",
            "set --rollout.n_samples_per_prompt 8, or take the estimator gae or reinforce",
        )
    if advantage.gamma != 1 and estimator not in ("gae", "reinforce"):
        yield wrong(
            "algo.advantage.gamma",
            advantage.gamma,
            f"{estimator} does not discount",
            "leave it at 1, or take the estimator gae or reinforce",
        )
    if needs_critic(config):
        return
    if config.critic.freezing_steps >= 0:
        yield wrong(
            "critic.freezing_steps",
            config.critic.freezing_steps,
            f"there is no critic to train first: {estimator} has none",
            "leave the flag away, or take --algo.advantage.estimator gae",
        )
    if config.critic.save_value_network:
        yield wrong(
            "critic.save_value_network",
            None,
            f"there is no critic to save: {estimator} has none",
            "leave the flag away, or take --algo.advantage.estimator gae",
        )
    if config.critic.address:
        yield wrong(
            "critic.address",
            config.critic.address,
            f"no critic is used: {estimator} has none",
            "leave the flag away, or take --algo.advantage.estimator gae",
        )


def check_correction(config: PpoConfig) -> Iterator[ConfigError]:
    """The correction for the difference between rollout engine and learner."""
    advantage = config.algo.advantage
    name = "algo.advantage.is_correction_threshold"
    if len(advantage.is_correction_threshold) not in (1, 2):
        yield wrong(
            name,
            advantage.is_correction_threshold,
            f"{len(advantage.is_correction_threshold)} numbers are no band",
            "give LOW HIGH, or HIGH alone",
        )
        return
    low, high = correction_band(advantage)
    if not low < high:
        yield wrong(name, advantage.is_correction_threshold, "the band is empty", "give LOW < HIGH")
    if advantage.is_correction_level == "off":
        return
    if advantage.is_correction_mode == "clip" and not (
        advantage.is_correction_level == "token" and advantage.is_correction_gating == "ratio"
    ):
        yield wrong(
            "algo.advantage.is_correction_mode",
            "clip",
            "only the ratio of a token can be clipped",
            "take is_correction_level token with is_correction_gating ratio, or "
            "is_correction_mode mask",
        )
    if advantage.is_correction_gating != "ratio" and low != 0:
        yield wrong(
            name,
            advantage.is_correction_threshold,
            f"{advantage.is_correction_gating} is a distance, best at 0: it has no lower bound",
            "give one number",
        )
    yield from _check_correction_use(config)


def _check_correction_use(config: PpoConfig) -> Iterator[ConfigError]:
    level = config.algo.advantage.is_correction_level
    if config.rollout.top_p < 1 or config.rollout.top_k > 0:
        yield wrong(
            "algo.advantage.is_correction_level",
            level,
            "top-p and top-k sampling change the engine's probabilities in a way that the learner "
            "does not, so every weight would be biased",
            "set --rollout.top_p 1 --rollout.top_k -1, or is_correction_level off",
        )


def check_kl(config: PpoConfig) -> Iterator[ConfigError]:
    """KL control, its loss and the reference model."""
    kl = config.algo.kl
    if kl.unbiased_gradient and not kl.use_loss:
        yield wrong(
            "algo.kl.unbiased_gradient",
            None,
            "KL in the reward has no gradient",
            "add --algo.kl.use_loss",
        )
    if needs_ref(config):
        return
    for name, is_set in (
        ("algo.kl.target", kl.target is not None),
        ("algo.kl.use_loss", kl.use_loss),
        ("ref.address", config.ref.address is not None),
    ):
        if is_set:
            yield wrong(
                name,
                None,
                "without a KL coefficient there is no reference model",
                "set --algo.kl.init_coef above 0, or leave the flag away",
            )


def check_rewards(config: PpoConfig) -> Iterator[ConfigError]:
    """Where rewards come from and how they are shaped."""
    reward = config.reward
    if not uses_agent(config):
        yield from check_reward_source(
            reward.model_name_or_path,
            reward.remote_url,
            parts=reward.parts,
            address=reward.address,
        )
    if not reward.clip_range[0] < reward.clip_range[1]:
        yield wrong("reward.clip_range", reward.clip_range, "the range is empty", "give LOW < HIGH")
    limit = longest_answer(config)
    if reward.overlong_buffer_len and reward.overlong_buffer_len > limit:
        yield wrong(
            "reward.overlong_buffer_len",
            reward.overlong_buffer_len,
            f"is more than the {limit} tokens that a completion may have",
            "make the buffer a part of them, for example a fifth",
        )
    if uses_agent(config):
        return
    has_model = reward.model_name_or_path or targets_of(reward.parts, "model")
    if reward.normalize_enable and not has_model and not reward.address:
        yield wrong(
            "reward.normalize_enable",
            None,
            "mean and standard deviation come from a reward model, and there is none",
            "leave the flag away, or give --reward.model_name_or_path",
        )


def check_reward_source(
    model: str | None, remote: str | None, *, parts: Sequence[str], address: str | None
) -> Iterator[ConfigError]:
    """One source of rewards: a model, a Python file, HTTP endpoints, a sum, or a service."""
    sources = split_list(remote)
    if parts:
        yield from check_parts(parts)
        if model or sources or address:
            yield wrong(
                "reward.parts",
                " ".join(parts),
                "there is another source of rewards beside the sum",
                "make it a part: 1:model:NAME, 1:file.py, or leave it away",
            )
        return
    files = [source for source in sources if source.endswith(".py")]
    if len(split_list(model)) > 1:
        yield wrong(
            "reward.model_name_or_path",
            model,
            "one reward service scores with one model",
            "combine models in a reward function, --reward.remote_url file.py",
        )
    if sources and address:
        yield wrong(
            "reward.remote_url",
            remote,
            "the service at --reward.address has its own source of rewards",
            "leave one of the two away",
        )
    if model and sources:
        yield wrong(
            "reward.remote_url",
            remote,
            "there are two sources of rewards, the other is --reward.model_name_or_path",
            "leave one of the two away",
        )
    if not model and not sources and not address:
        yield wrong(
            "reward.model_name_or_path",
            None,
            "nothing says where rewards come from",
            "give --reward.model_name_or_path, --reward.remote_url with a Python file or URLs, or "
            "--reward.parts",
        )
    if files and len(sources) > 1:
        yield wrong(
            "reward.remote_url", remote, "a Python file must be the only source", "give one file"
        )
    for source in sources:
        if not source.endswith(".py") and not source.startswith(("http://", "https://")):
            yield wrong(
                "reward.remote_url",
                source,
                "is neither a Python file nor a URL",
                "give a path that ends in .py, or http://host:port/path",
            )


def check_sampling(config: PpoConfig) -> Iterator[ConfigError]:
    """Lengths and the sizes of rollouts."""
    rollout = config.rollout
    if rollout.max_new_tokens is not None and rollout.max_new_tokens >= config.data.max_len:
        yield wrong(
            "rollout.max_new_tokens",
            rollout.max_new_tokens,
            f"leaves no room for the prompt in --data.max_len {config.data.max_len}",
            "make data.max_len the longest prompt plus max_new_tokens",
        )
    yield from check_served_run(config)
    generate = rollout.vllm_generate_batch_size
    if generate and generate > rollout.batch_size and not config.train.async_enable:
        yield wrong(
            "rollout.vllm_generate_batch_size",
            generate,
            f"is more than the {rollout.batch_size} prompts of a rollout",
            "generating ahead needs --train.async_enable",
        )
    low, high = config.algo.dynamic_filtering_range
    if not low < high:
        yield wrong(
            "algo.dynamic_filtering_range", (low, high), "the range is empty", "give LOW < HIGH"
        )
    if config.algo.dynamic_filtering_enable and rollout.n_samples_per_prompt < 2:
        yield wrong(
            "rollout.n_samples_per_prompt",
            rollout.n_samples_per_prompt,
            "dynamic filtering looks at groups, so it needs at least 2",
            "set --rollout.n_samples_per_prompt 8",
        )


def check_batches(config: PpoConfig) -> Iterator[ConfigError]:
    """Optimizer batches against the samples of a rollout."""
    samples = samples_per_rollout(config)
    if config.train.batch_size > samples:
        yield wrong(
            "train.batch_size",
            config.train.batch_size,
            f"a rollout has only {samples} samples ({config.rollout.batch_size} prompts x "
            f"{config.rollout.n_samples_per_prompt}), so no optimizer step would be full",
            f"set --train.batch_size {samples} or less, or a larger --rollout.batch_size",
        )
    if not config.train.dynamic_batch_enable:
        return
    for name, budget in (
        ("train.max_tokens_per_gpu", config.train.max_tokens_per_gpu),
        ("rollout.max_tokens_per_gpu", config.rollout.max_tokens_per_gpu),
    ):
        if budget is not None and budget < config.data.max_len:
            yield wrong(
                name,
                budget,
                f"a sequence of --data.max_len {config.data.max_len} tokens would not fit",
                f"give at least {config.data.max_len}",
            )


def check_modes(config: PpoConfig) -> Iterator[ConfigError]:
    """Asynchrony and images."""
    train = config.train
    if train.max_staleness is not None and not train.async_enable:
        yield wrong(
            "train.max_staleness",
            train.max_staleness,
            "without generation ahead of training no sample is older than the last push",
            "add --train.async_enable, or leave the flag away",
        )
    if train.async_enable and train.full_determinism_enable:
        yield wrong(
            "train.full_determinism_enable",
            None,
            "which weights sample which token depends on the clock when generation runs ahead",
            "leave one of the flags away",
        )
    if train.partial_rollout_enable and not train.async_enable:
        yield wrong(
            "train.partial_rollout_enable",
            None,
            "only generation that goes on during training can be partial",
            "add --train.async_enable",
        )
    if train.async_enable and config.vllm.enable_sleep:
        yield wrong(
            "vllm.enable_sleep",
            None,
            "an engine that generates during training cannot sleep",
            "leave the flag away, or --train.async_enable",
        )
    if train.async_enable and config.ds.enable_sleep:
        yield wrong(
            "ds.enable_sleep",
            None,
            "models sleep between phases, and generation ahead of training has none",
            "leave the flag away, or --train.async_enable",
        )
    if config.data.max_images_per_prompt and needs_critic(config):
        yield wrong(
            "data.max_images_per_prompt",
            config.data.max_images_per_prompt,
            "there is no critic for images",
            "take another --algo.advantage.estimator",
        )
    if config.data.max_images_per_prompt and config.ds.packing_samples:
        yield wrong(
            "data.max_images_per_prompt",
            config.data.max_images_per_prompt,
            "samples with images cannot be packed",
            "leave --ds.packing_samples away",
        )


def check_evaluation(config: PpoConfig) -> Iterator[ConfigError]:
    """Evaluation, and the best checkpoint that it chooses."""
    if config.eval.steps > 0 and not config.eval.dataset:
        yield wrong(
            "eval.steps",
            config.eval.steps,
            "there is nothing to evaluate on",
            "give --eval.dataset, or leave the flag away",
        )
    key = config.ckpt.best_metric_key
    if key in ("", "none"):
        return
    if config.eval.steps < 1 or not config.eval.dataset:
        yield wrong(
            "ckpt.best_metric_key",
            key,
            "nothing is evaluated",
            "give --eval.dataset and --eval.steps, or leave the flag away",
        )
    if config.ckpt.disable_ds and not config.ckpt.save_hf:
        yield wrong(
            "ckpt.best_metric_key",
            key,
            "with --ckpt.disable_ds and without --ckpt.save_hf no checkpoint is written",
            "leave one of the flags away",
        )
