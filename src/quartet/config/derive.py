"""Values that follow from others. One place each, for trainer, plan and checks alike."""

from __future__ import annotations

from collections.abc import Sequence

from quartet.config.algo import GROUP_ESTIMATORS, AdvantageConfig
from quartet.config.machine import Machine
from quartet.config.methods import PpoConfig, TrainerConfig
from quartet.config.models import ActorConfig
from quartet.config.sampling import EngineName


def split_list(value: str | None) -> tuple[str, ...]:
    """Entries of a list with commas; none for None and for an empty text."""
    return tuple(entry.strip() for entry in (value or "").split(",") if entry.strip())


def clip_band(actor: ActorConfig) -> tuple[float, float]:
    """Clip ranges (low, high) of the ratio."""
    return actor.eps_clip_low_high or (actor.eps_clip, actor.eps_clip)


def longest_answer(config: PpoConfig) -> int:
    """Most tokens that a completion may have."""
    return config.rollout.max_new_tokens or config.data.max_len


def longest_prompt(config: PpoConfig) -> int:
    """Most tokens that a prompt may have: what completions leave of the context."""
    return config.data.max_len - (config.rollout.max_new_tokens or 1)


def aggregation_length(config: PpoConfig) -> int:
    """Tokens that seq-mean-token-sum-norm divides by; 0 for the other aggregations."""
    if config.actor.loss_agg_mode != "seq-mean-token-sum-norm":
        return 0
    return config.actor.loss_agg_length or longest_answer(config)


def correction_band(advantage: AdvantageConfig) -> tuple[float, float]:
    """Band (low, high) of the rollout correction; one given number is its upper end."""
    *low, high = advantage.is_correction_threshold
    return (low[0] if low else 0.0, high)


def uses_agent(config: PpoConfig) -> bool:
    """An agent makes the samples, and judges them: there is no reward service."""
    return bool(config.train.agent_func_path)


def needs_critic(config: PpoConfig) -> bool:
    """Only GAE has a critic."""
    return config.algo.advantage.estimator == "gae"


def needs_groups(config: PpoConfig) -> bool:
    """True for estimators whose baseline is the rest of the group."""
    return config.algo.advantage.estimator in GROUP_ESTIMATORS


def needs_ref(config: PpoConfig) -> bool:
    """Without a KL term there is no reference model."""
    return config.algo.kl.init_coef != 0


def critic_model(config: PpoConfig) -> str | None:
    """The critic's starting point: as given, else the reward model, else the policy."""
    reward = split_list(config.reward.model_name_or_path)
    return config.critic.model_name_or_path or (
        reward[0] if reward else config.actor.model_name_or_path
    )


def trained_model(config: TrainerConfig) -> str | None:
    """The model that the method trains."""
    if isinstance(config, PpoConfig):
        return config.actor.model_name_or_path
    return config.model.model_name_or_path


def num_engines(config: PpoConfig) -> int:
    """Rollout services that the trainer starts."""
    return config.vllm.num_engines or 1


def num_ranks(config: TrainerConfig, machine: Machine, role: str = "learner") -> int:
    """Processes of a learner that the trainer starts.

    Args:
        config: the training configuration.
        machine: where it runs.
        role: learner (the policy, or the model of SFT, RM, DPO) or critic.
    """
    if config.learner.num_ranks is not None:
        return config.learner.num_ranks
    if machine.num_gpus == 0:
        return 1
    if not isinstance(config, PpoConfig):
        return machine.num_gpus
    section = config.critic if role == "critic" else config.actor
    return section.num_nodes * section.num_gpus_per_node


def engine_python(config: object) -> str | None:
    """The Python of the rollout services that the trainer starts; None is its own."""
    return config.rollout.python if isinstance(config, PpoConfig) else None


def rollout_engine(engine: EngineName, machine: Machine) -> EngineName:
    """The engine that `auto` stands for on a machine."""
    if engine != "auto":
        return engine
    return "vllm" if machine.has_vllm else "transformers"


def attention(implementation: str, machine: Machine) -> str:
    """The attention that can run: flash attention needs a GPU."""
    if machine.num_gpus == 0 and "flash" in implementation:
        return "sdpa"
    return implementation


def samples_per_rollout(config: PpoConfig) -> int:
    """Completions of one rollout."""
    return config.rollout.batch_size * config.rollout.n_samples_per_prompt


def optimizer_steps_per_rollout(config: PpoConfig) -> int:
    """Optimizer steps on one rollout; the last step of a pass may be a smaller batch."""
    return -(-samples_per_rollout(config) // config.train.batch_size) * config.train.max_epochs


def batch_sizes(num_samples: int, batch_size: int) -> Sequence[int]:
    """Sizes of the optimizer batches that a number of samples is cut into, all samples used."""
    full, rest = divmod(num_samples, batch_size)
    return [batch_size] * full + ([rest] if rest else [])


def groups_in_flight(config: PpoConfig) -> int | None:
    """Prompts that may generate at the same time; None leaves it to the services."""
    bounds = (config.rollout.max_groups_in_flight, config.rollout.vllm_generate_batch_size)
    return min((bound for bound in bounds if bound is not None), default=None)


def generate_size(config: PpoConfig) -> int:
    """Prompts that asynchronous generation draws at once."""
    return max(config.rollout.batch_size, config.rollout.vllm_generate_batch_size or 0)


def max_staleness(config: PpoConfig) -> int:
    """Versions that a token of an asynchronous run may be old when it is trained.

    Where it is not given, what follows from the queue: a rollout begins when as many as the queue
    holds are before it, and what is drawn beyond a rollout waits for further ones.
    """
    if config.train.max_staleness is not None:
        return config.train.max_staleness
    beyond = -(-generate_size(config) // config.rollout.batch_size) - 1
    return config.train.async_queue_size + beyond


def train_token_budget(config: PpoConfig) -> int | None:
    """Tokens of a training micro-batch; None cuts by `train.micro_batch_size`."""
    return config.train.max_tokens_per_gpu if config.train.dynamic_batch_enable else None


def forward_token_budget(config: PpoConfig) -> int:
    """Tokens of a forward pass for log-probabilities and values."""
    if config.train.dynamic_batch_enable:
        return config.rollout.max_tokens_per_gpu or config.train.max_tokens_per_gpu
    return config.rollout.micro_batch_size * config.data.max_len


def push_backend(config: PpoConfig, machine: Machine) -> tuple[str, str]:
    """How weights travel from the learner to the engines, and why.

    Returns:
        The backend (nccl, gloo, ipc, file, or auto while it is open) and half a sentence.
    """
    if config.push.backend != "auto":
        return config.push.backend, "as --push.backend says"
    if config.rollout.engine == "openai" and not config.rollout.address:
        return "file", "the engine openai takes nothing else"
    if config.vllm.sync_backend == "gloo":
        return "gloo", "as --vllm.sync_backend says"
    if config.learner.address:
        return "auto", "the services say what they have when they answer"
    if machine.num_gpus == 0:
        return "gloo", "there is no GPU here"
    if not shares_gpus(config):
        return "nccl", "learner and engines have GPUs of their own"
    if engine_gpus(config) == 1:
        return "ipc", "learner and engine share one GPU"
    return "gloo", "learner and engines share GPUs, and NCCL takes one rank a GPU"


def shares_gpus(config: PpoConfig) -> bool:
    """Whether the learner's ranks and the engines that the trainer starts are on the same GPUs."""
    colocated = config.train.colocate_all and not config.train.async_enable
    return colocated and not config.rollout.address and not config.learner.address


def engine_gpus(config: PpoConfig) -> int:
    """GPUs that the engines take together. One is the GPU of the learner's rank 0, if shared."""
    return num_engines(config) * config.vllm.tensor_parallel_size
