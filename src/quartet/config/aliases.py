"""Other spellings of flags, and flags that are gone: what to write instead."""

from __future__ import annotations

from collections.abc import Mapping

from quartet.config.tree import leaves

_ALIASES: Mapping[str, str] = {
    "algo.advantage_estimator": "algo.advantage.estimator",
    "host": "rpc.host",
    "port": "rpc.port",
}

GONE: Mapping[str, str] = {
    "algo.advantage.is_correction_enable": "write --algo.advantage.is_correction_level token "
    "(or seq)",
    "algo.advantage.is_correction_type": "tis is --algo.advantage.is_correction_level token with "
    "is_correction_mode clip; icepop is token with mask; seq-mask-tis is seq with mask",
    "prompt_max_len": "--data.max_len bounds prompt and completion together",
    "generate_max_len": "write --rollout.max_new_tokens",
    "remote_rm_url": "write --reward.remote_url",
    "pretrain": "write --actor.model_name_or_path (PPO) or --model.model_name_or_path",
    "reward_pretrain": "write --reward.model_name_or_path",
    "critic_pretrain": "write --critic.model_name_or_path",
    "advantage_estimator": "write --algo.advantage.estimator",
    "value_prefix_head": "write --ds.value_head_prefix",
    "value_head_prefix": "write --ds.value_head_prefix",
    "init_kl_coef": "write --algo.kl.init_coef",
    "eval_dataset": "write --eval.dataset",
    "use_dynamic_batch": "write --train.dynamic_batch_enable",
    "chosen_key": "write --data.chosen_key",
    "rejected_key": "write --data.rejected_key",
    "input_key": "write --data.input_key",
    "colocate_all_models": "write --train.colocate_all",
    "deepspeed": "Quartet starts its own processes; see --learner.num_ranks",
}
"""Flags of earlier OpenRLHF versions that people still copy, each with what replaced it."""


def canonical_name(name: str, cls: type) -> str:
    """The name of a value from one of its spellings; other names come back as they are."""
    target = _ALIASES.get(name, name)
    return target if target in leaves(cls) else name


def aliases_of(name: str, cls: type) -> tuple[str, ...]:
    """Other spellings of a value, for --help and docs."""
    if name not in leaves(cls):
        return ()
    return tuple(alias for alias, target in _ALIASES.items() if target == name)
