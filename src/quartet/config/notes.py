"""Sentences about settings that have no effect, or another than a reader may expect.

They are printed with the plan and at the start of a run. What is wrong is an error instead: see
`quartet.config.validate`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from quartet.config.derive import (
    attention,
    critic_model,
    needs_critic,
    needs_ref,
    num_ranks,
    samples_per_rollout,
    trained_model,
)
from quartet.config.load import ENV_PREFIX
from quartet.config.machine import Machine
from quartet.config.methods import DpoConfig, PpoConfig, SftConfig, TrainerConfig
from quartet.config.placement import places
from quartet.config.runnable import is_local
from quartet.config.support import wanted_engine
from quartet.config.tree import flat, value_of

_WHITENED = frozenset({"gae", "reinforce", "reinforce_baseline"})
"""Estimators whose advantages are whitened over the batch."""


_SERVANTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("train.async_enable", ("train.async_queue_size",)),
    ("train.enable_ema", ("train.ema_beta",)),
    (
        "train.agent_func_path",
        ("train.agent_timeout", "train.agent_num_workers", "train.agent_episodes_per_worker"),
    ),
    (
        "algo.dynamic_filtering_enable",
        ("algo.dynamic_filtering_range", "algo.dynamic_filtering_mean_only"),
    ),
    ("algo.kl.target", ("algo.kl.horizon",)),
    ("reward.overlong_buffer_len", ("reward.overlong_penalty_factor",)),
)
"""Flags of PPO that turn something on, and those that only say how."""


def notes(
    config: TrainerConfig, machine: Machine, origins: Mapping[str, str] | None = None
) -> Iterator[str]:
    """What a user should know about a configuration.

    Args:
        config: the configuration.
        machine: where it is to run.
        origins: which values were given; None takes those that differ from their defaults.
    """
    given = chosen(config, origins)
    yield from _machine_notes(config, machine, given)
    if isinstance(config, PpoConfig):
        yield from _ppo_batches(config, machine)
        yield from _ppo_algorithm(config, given)
        yield from _ppo_engine(config, machine, given)
    yield from _data_notes(config, given)
    yield from _adapter_notes(config, given)
    yield from _ignored(config, given)


def chosen(config: TrainerConfig, origins: Mapping[str, str] | None) -> set[str]:
    """Names of the values that somebody chose.

    A file may hold every value, as the one that a run keeps does; there only what differs from the
    default counts. A flag or variable counts in any case.
    """
    default = flat(type(config)())
    changed = {name for name, value in flat(config).items() if value != default[name]}
    typed = {
        name for name, origin in (origins or {}).items() if origin.startswith(("--", ENV_PREFIX))
    }
    return (changed if origins is None else changed & set(origins)) | typed


def _machine_notes(config: TrainerConfig, machine: Machine, given: set[str]) -> Iterator[str]:
    wanted = config.ds.attn_implementation
    if all(place.address for place in places(config, machine)):
        # The one thing of ds.* that concerns the trainer is how it loads the tokenizer.
        idle = {name for name in given if name.startswith("ds.")} - {"ds.trust_remote_code"}
        if idle:
            yield f"{', '.join(sorted(idle))}: no effect on services with an address."
    else:
        if (used := attention(wanted, machine)) != wanted:
            yield f"ds.attn_implementation: {wanted} needs a GPU, so {used} is used."
        if machine.num_gpus == 0 and config.ds.param_dtype == "bf16":
            yield (
                "ds.param_dtype: bf16 is slow and coarse on a CPU; --ds.param_dtype fp32 is better."
            )
    model = trained_model(config)
    if model and not is_local(model):
        yield f"{model} is no folder here: it is a name on the Hugging Face hub, and downloaded."


def _ppo_batches(config: PpoConfig, machine: Machine) -> Iterator[str]:
    samples, batch = samples_per_rollout(config), config.train.batch_size
    if rest := samples % batch:
        yield (
            f"train.batch_size: {samples} samples of a rollout are not a multiple of {batch}; the "
            f"last optimizer step of each pass has {rest}. No sample is left out."
        )
    ranks = num_ranks(config, machine)
    if batch < ranks:
        yield f"train.batch_size: with {batch} samples for {ranks} ranks some ranks stand idle."


def _ppo_algorithm(config: PpoConfig, given: set[str]) -> Iterator[str]:
    advantage, kl = config.algo.advantage, config.algo.kl
    estimator = advantage.estimator
    if not needs_critic(config) and any(name.startswith("critic.") for name in given):
        yield f"critic.*: {estimator} has no critic; these flags have no effect."
    if _starts_critic(config) and config.critic.model_name_or_path is None:
        yield f"critic.model_name_or_path: the critic starts from {critic_model(config)}."
    if estimator != "gae" and advantage.lambd != 1:
        yield f"algo.advantage.lambd: only gae has a lambda; {estimator} does not use it."
    if advantage.no_std_norm and estimator not in _WHITENED:
        yield f"algo.advantage.no_std_norm: {estimator} does not whiten; it has no effect."
    if not needs_ref(config):
        yield "algo.kl.init_coef is 0: there is no reference model, and no KL is logged."
    if needs_ref(config) and kl.use_loss and kl.estimator == "k1" and not kl.unbiased_gradient:
        yield (
            "algo.kl.estimator: as a loss, k1 has a gradient of mean 0; k2, or "
            "--algo.kl.unbiased_gradient, pulls towards the reference model."
        )
    if needs_ref(config) and not kl.use_loss and kl.estimator != "k1":
        yield f"algo.kl.estimator: in the reward k1 is unbiased, {kl.estimator} is not."
    yield from _policy_loss(config, given)
    if (
        advantage.is_correction_level == "off"
        and {
            "algo.advantage.is_correction_mode",
            "algo.advantage.is_correction_gating",
            "algo.advantage.is_correction_threshold",
        }
        & given
    ):
        yield "algo.advantage.is_correction_*: the correction is off (is_correction_level)."
    if config.train.colocate_all and config.train.async_enable:
        yield (
            "train.colocate_all: engines that generate during training have GPUs of their own; "
            "only the other models share."
        )
    is_older = config.train.async_enable and config.train.max_staleness != 0
    if is_older and config.algo.advantage.is_correction_level == "off":
        yield (
            "train.async_enable: samples may be of older weights, and nothing corrects for that; "
            "see --algo.advantage.is_correction_level."
        )
    if config.train.colocate_all and config.train.colocate_critic_reward:
        yield "train.colocate_critic_reward: colocate_all shares all GPUs already."


def _policy_loss(config: PpoConfig, given: set[str]) -> Iterator[str]:
    actor, advantage = config.actor, config.algo.advantage
    gspo = actor.policy_loss_type == "gspo"
    if gspo and actor.loss_agg_mode != "seq-mean-token-mean":
        yield "actor.loss_agg_mode: gspo takes the mean over sequences, whatever is set."
    if gspo and advantage.is_correction_level != "off":
        yield (
            "algo.advantage.is_correction_*: gspo takes its ratio to the rollout engine's "
            "log-probabilities; level, mode, gating and threshold have no effect."
        )
    if actor.policy_loss_type == "cispo" and actor.dual_clip is not None:
        yield "actor.dual_clip: no effect on cispo."
    if "actor.loss_agg_length" in given and actor.loss_agg_mode != "seq-mean-token-sum-norm":
        yield "actor.loss_agg_length: only seq-mean-token-sum-norm has a length."


def _ppo_engine(config: PpoConfig, machine: Machine, given: set[str]) -> Iterator[str]:
    if config.rollout.address:
        local = {"rollout.python", "rollout.engine", "rollout.max_num_sequences"}
        prefixes = ("vllm.", "rollout.server_")
        set_here = sorted(name for name in given if name.startswith(prefixes) or name in local)
        if set_here:
            yield f"{', '.join(set_here)}: the services at --rollout.address have their own."
        return
    engine = wanted_engine(config, machine)
    if engine == "vllm":
        return
    of_vllm = {
        "enable_prefix_caching",
        "enforce_eager",
        "extra",
        "gloo_into",
        "gpu_memory_utilization",
    }
    set_here = sorted(name for name in given if name.removeprefix("vllm.") in of_vllm)
    if set_here:
        yield f"{', '.join(set_here)}: no effect on the engine {engine}."


def _data_notes(config: TrainerConfig, given: set[str]) -> Iterator[str]:
    data = config.data
    if data.apply_chat_template and "data.input_template" in given and data.input_template:
        yield "data.input_template: the chat template takes its place."
    if not isinstance(config, PpoConfig) and (
        data.tokenizer_chat_template and not data.apply_chat_template  # pyright: ignore[reportAttributeAccessIssue]
    ):
        yield "data.tokenizer_chat_template: no effect without --data.apply_chat_template."
    if isinstance(config, SftConfig) and config.model.pretrain_mode_enable:
        unused = {"data.output_key", "data.apply_chat_template", "data.multiturn"} & given
        if unused:
            yield f"{', '.join(sorted(unused))}: raw text has none of it in pre-training mode."
    if isinstance(config, DpoConfig) and not (config.ref.address or config.ref.model_name_or_path):
        yield "ref.model_name_or_path: the reference model is the model as it is at the start."


def _adapter_notes(config: TrainerConfig, given: set[str]) -> Iterator[str]:
    lora = config.ds.lora
    idle = {"ds.lora.alpha", "ds.lora.dropout", "ds.lora.target_modules"} & given
    if lora.rank == 0 and idle:
        yield f"{', '.join(sorted(idle))}: no effect without --ds.lora.rank."
    if isinstance(config, PpoConfig):
        if lora.rank > 0 and lora.dropout > 0:
            yield (
                "ds.lora.dropout: training passes drop inputs and old log-probabilities are "
                "computed without, so ratios scatter around 1."
            )
        if config.ds.load_in_4bit and needs_ref(config):
            yield (
                "ds.load_in_4bit: the reference is not quantised, so the KL begins at what "
                "rounding the policy costs."
            )


def _ignored(config: TrainerConfig, given: set[str]) -> Iterator[str]:
    if not isinstance(config, PpoConfig):
        return
    for master, servants in _SERVANTS:
        idle = given.intersection(servants)
        if idle and not value_of(config, master):
            yield f"{', '.join(sorted(idle))}: no effect without --{master}."
    if config.train.dynamic_batch_enable:
        if "train.micro_batch_size" in given:
            yield "train.micro_batch_size: micro-batches are filled by tokens instead."
    elif {"train.max_tokens_per_gpu", "rollout.max_tokens_per_gpu"} & given:
        yield "train.max_tokens_per_gpu: no effect without --train.dynamic_batch_enable."
    if config.eval.dataset and config.eval.steps < 1:
        yield "eval.dataset: PPO evaluates only with --eval.steps N, so it is not used."
    for role in ("reward", "critic", "ref", "actor"):
        address = config.learner.address if role == "actor" else getattr(config, role).address
        if address and f"{role}.num_gpus_per_node" in given:
            yield f"{role}.num_gpus_per_node: the service at {address} has its own GPUs."
    if config.reward.address and config.reward.model_name_or_path:
        use = "here it only starts the critic" if _starts_critic(config) else "it has no effect"
        yield f"reward.model_name_or_path: the service at --reward.address has its own; {use}."


def _starts_critic(config: PpoConfig) -> bool:
    """True when there is a critic and the trainer is to start it."""
    return needs_critic(config) and not config.critic.address
