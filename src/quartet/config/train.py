"""Section `train`: batches, epochs, seeds; and where the models of PPO live."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class DeterminismFields:
    """What trainer and services must agree on for a run to be repeatable."""

    seed: int = 42
    """Seed of everything random: data order, sampling, new heads."""
    full_determinism_enable: bool = False
    """Same seed, same bits: deterministic kernels, and batches of a fixed composition."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig(DeterminismFields):
    """How training goes over its samples."""

    batch_size: int = 128
    """Samples (RM, DPO: pairs) of one optimizer step, over all GPUs."""
    micro_batch_size: int = 8
    """Samples (RM, DPO: pairs) of one forward and backward pass on one GPU. Memory depends on
    it, the result does not."""
    max_epochs: int = 1
    """SFT, RM, DPO: passes over the data. PPO: passes over each rollout."""
    max_steps: int | None = None
    """End after so many steps (PPO: rollouts; else optimizer steps), even if data is left."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PpoTrainConfig(TrainConfig):
    """How PPO goes over its samples, and what shares which GPUs."""

    micro_batch_size: int = 1
    """Samples of one forward and backward pass on one GPU, unless `dynamic_batch_enable`. Memory
    depends on it, the result does not."""
    num_episodes: int = 1
    """Passes over the prompts."""
    dynamic_batch_enable: bool = False
    """Fill micro-batches up to a number of tokens, instead of a number of samples."""
    max_tokens_per_gpu: int = 16192
    """That number of tokens, for each GPU."""
    colocate_actor_ref: bool = False
    """Policy and reference model share GPUs."""
    colocate_critic_reward: bool = False
    """Critic and reward model share GPUs."""
    colocate_all: bool = False
    """All models, and the rollout engines, share the policy's GPUs."""
    async_enable: bool = False
    """Generate the next rollouts while this one is trained."""
    async_queue_size: int = 1
    """Rollouts that may be in the making or wait for the learner."""
    max_staleness: int | None = None
    """With `async_enable`: pushes that may lie between the weights that sampled a token and those
    that are trained on it. Default: what follows from the queue. 0 is training in turn."""
    partial_rollout_enable: bool = False
    """With `async_enable`: push weights in the middle of completions, which go on with the new
    ones. Without it a push waits until those under way are done."""
    enable_ema: bool = False
    """Keep a moving average of the policy's weights, and export that."""
    ema_beta: float = 0.992
    """Weight of the past in that average."""
    agent_func_path: str | None = None
    """A Python file with an `AgentExecutor` that makes the samples and their rewards."""
    agent_timeout: float = 600.0
    """Seconds that an agent's own code may take for one sample; waiting for the policy does not
    count. A sample beyond it is dropped, and a worker that it blocks is replaced."""
    agent_num_workers: int = 2
    """Processes that run the agent."""
    agent_episodes_per_worker: int = 32
    """Samples that one of them makes at a time; 1 for an agent whose code blocks."""
