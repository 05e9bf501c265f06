"""What this build does with flags whose machinery is not there: one table, nothing in silence.

A flag of `REFUSED` may be parsed, but a value other than its default stops the run before it
starts, with the sentence here. A flag of `EXPLAINED` is accepted, and what is different here is
said. All other flags do what their help says. docs/flags.md is made from the same tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from quartet.config.derive import rollout_engine
from quartet.config.machine import Machine
from quartet.config.methods import PpoConfig
from quartet.config.sampling import EngineName
from quartet.config.serve import RolloutServeConfig
from quartet.config.tree import flat, value_of, wrong
from quartet.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """Why a flag is refused, and what to use instead."""

    why: str
    instead: str


REFUSED: Mapping[str, Refusal] = {
    "data.max_images_per_prompt": Refusal(
        why="models of images are not in this release", instead="leave it at 0"
    ),
    "data.image_key": Refusal(
        why="models of images are not in this release", instead="leave the flag away"
    ),
    "actor.freeze_visual_encoder": Refusal(
        why="models of images are not in this release", instead="leave the flag away"
    ),
    "learner.freeze_visual_encoder": Refusal(
        why="models of images are not in this release", instead="leave the flag away"
    ),
    "vllm.sync_with_ray": Refusal(
        why="there is no Ray here", instead="leave the flag away; --push.backend chooses the way"
    ),
    "use_ms": Refusal(
        why="ModelScope downloads are not in this release",
        instead="download the model first and give its folder",
    ),
    "local_rank": Refusal(
        why="Quartet starts its own processes",
        instead="start `quartet train` once, without deepspeed or torchrun",
    ),
}
"""Flags refused at any other value than their default."""

EXPLAINED: Mapping[str, str] = {
    "actor.num_nodes": "The trainer starts services on its own machine; for others give "
    "--learner.address.",
    "critic.num_nodes": "The trainer starts services on its own machine; for others give "
    "--critic.address.",
    "ref.num_nodes": "The trainer starts services on its own machine; for others give "
    "--ref.address.",
    "reward.num_nodes": "The trainer starts services on its own machine; for others give "
    "--reward.address.",
    "actor.num_gpus_per_node": "Has no effect on a machine without a GPU: see --learner.num_ranks.",
    "critic.num_gpus_per_node": "Has no effect on a machine without a GPU: see "
    "--learner.num_ranks.",
    "ref.num_gpus_per_node": "One replica of the ref service on each GPU; one in all without GPUs.",
    "reward.num_gpus_per_node": "One replica of a reward model on each GPU; one in all without "
    "GPUs.",
    "vllm.sync_backend": "nccl leaves the choice to --push.backend, gloo forces it.",
    "vllm.num_engines": "Counts services of any engine; OpenRLHF has no default.",
    "vllm.enable_prefix_caching": "Only the engine vllm has it.",
    "vllm.enforce_eager": "Only the engine vllm captures graphs.",
    "vllm.gpu_memory_utilization": "Only the engine vllm reserves memory.",
    "rollout.vllm_generate_batch_size": "Prompts in flight at most. With --train.async_enable also "
    "those that are drawn at once: what is beyond a rollout is kept for the next.",
    "train.agent_func_path": "Runs in processes of its own, with a time limit; a sample that fails "
    "is dropped and counted. OpenRLHF's files run unchanged: docs/agents.md.",
    "train.async_enable": "Old log-probabilities and values are the learners' own, just before "
    "they train; --algo.advantage.is_correction_level corrects for older samples.",
    "rollout.micro_batch_size": "Forward passes are cut by tokens: this many sequences of "
    "data.max_len.",
    "ds.enable_sleep": "Policy, critic, reference and reward model leave the GPU while others "
    "work; an error without --train.colocate_all.",
    "vllm.enable_sleep": "An error without --train.colocate_all, which OpenRLHF answers by leaving "
    "it off.",
    "logger.wandb.key": "Never written to the run's files or logs.",
    "reward.clip_range": "Clips rewards before the baseline is taken off; "
    "--reward.clip_after_baseline is OpenRLHF's order.",
    "reward.stop_properly_penalty_coef": "Never raises a reward; --reward.stop_properly_legacy is "
    "OpenRLHF's rule.",
    "ds.adam_offload": "Changes nothing where there is no GPU, and the learner says so.",
    "ds.use_universal_ckpt": "Every checkpoint can be loaded by any number of ranks and at any "
    "ZeRO stage, with and without this flag.",
    "ds.attn_implementation": "Where there is no GPU, sdpa takes the place of flash "
    "attention, and the service says so.",
    "ds.lora.rank": "A scalar head is trained whole and saved; pushes and exports carry the merged "
    "model, and an export has the adapter in adapter/.",
    "ds.lora.dropout": "In training passes alone; log-probabilities and values of samples are "
    "computed without.",
    "ds.load_in_4bit": "Of learners; ref, reward and rollout load the weights as they are.",
    "model.loss_type": "sigmoid or logexp; OpenRLHF takes any other word for logexp.",
    "critic.model_name_or_path": "Only gae has a critic.",
    **{
        f"{prefix}muon.{name}": "OpenRLHF ignores it."
        for prefix in ("", "actor.", "critic.")
        for name in ("ns_steps", "nesterov")
    },
    "actor.aux_loss_coef": "The mean over sequences of each one's balance loss, by tokens, so it "
    "does not depend on the cut into micro-batches; OpenRLHF takes one of each micro-batch.",
    "model.aux_loss_coef": "The mean over sequences of each one's balance loss, by tokens, so it "
    "does not depend on the cut into micro-batches; OpenRLHF takes one of each micro-batch.",
    "algo.kl.estimator": "k3 alone is bounded, and keeps a gradient beyond its bound; "
    "--algo.kl.bound_all is OpenRLHF's rule.",
    "algo.kl.horizon": "The factor of one step is kept within a half and two.",
    "model.ipo_enable": "--model.ipo_sum is OpenRLHF's form.",
    "eval.n_samples_per_prompt": "Rewards give pass1 and pass<n> as in OpenRLHF; scores of 0 and 1 "
    "also give the unbiased pass_at_<k>.",
    "ckpt.load_enable": "An error where there is no checkpoint, rather than a fresh start.",
    "algo.dynamic_filtering_enable": "--algo.dynamic_filtering_mean_only keeps groups of equal "
    "scores, as OpenRLHF does; dynamic_filtering_pass_rate is a share of groups.",
    "ckpt.best_metric_key": "The best checkpoint holds the weights that were evaluated. It is in "
    "ckpt.path/best and does not change where a run goes on. The flag wins over the metric of a "
    "run that goes on.",
    "ckpt.max_num": "The oldest goes when the new one is whole; copies of --ckpt.save_hf go with "
    "their checkpoint.",
}
"""Flags that are accepted, with what is different here."""


def unsupported(config: Any) -> Iterator[ConfigError]:
    """The error for every value that this build cannot honour."""
    defaults = flat(type(config)())
    for name, default in defaults.items():
        reason = REFUSED.get(name)
        value = value_of(config, name)
        if reason is not None and value != default:
            shown = None if isinstance(value, bool) else value
            yield wrong(name, shown, reason.why, reason.instead)
    if isinstance(config, PpoConfig) and config.ds.enable_sleep and config.ds.zero_stage == 3:
        yield wrong(
            "ds.enable_sleep",
            None,
            "what ZeRO stage 3 holds cannot leave the GPU in this release",
            "use --ds.zero_stage 2, or --ds.adam_offload to keep the optimizer in main memory",
        )


def wanted_engine(config: PpoConfig | RolloutServeConfig, machine: Machine) -> EngineName:
    """The engine that a command line asks for, be it on this machine or not."""
    return rollout_engine(config.rollout.engine, machine)
