"""The range of every number on its own. What depends on two values is in `checks`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from quartet.config.tree import leaves, value_of, wrong
from quartet.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Limit:
    """An interval, and perhaps one value outside it with a meaning of its own."""

    low: float = -math.inf
    high: float = math.inf
    low_open: bool = False
    """True when `low` itself is not allowed."""
    high_open: bool = False
    """True when `high` itself is not allowed."""
    also: float | None = None
    """A value outside that is allowed."""

    def admits(self, value: float) -> bool:
        """True when the value is allowed. NaN never is."""
        if self.also is not None and value == self.also:
            return True
        above = value > self.low if self.low_open else value >= self.low
        below = value < self.high if self.high_open else value <= self.high
        return above and below

    def __str__(self) -> str:
        """The range in words: `above 0 and at most 1`."""
        parts = [f"{self.also:g}"] if self.also is not None else []
        bounds = list[str]()
        if self.low > -math.inf:
            bounds.append(f"{'above' if self.low_open else 'at least'} {self.low:g}")
        if self.high < math.inf:
            bounds.append(f"{'below' if self.high_open else 'at most'} {self.high:g}")
        elif self.high_open:
            bounds.append("finite")
        return " or ".join([*parts, " and ".join(bounds)])


_COUNT = Limit(low=1)
_INDEX = Limit(low=0)
_EVERY = Limit(low=1, also=-1)
_POSITIVE = Limit(low=0, low_open=True, high=math.inf, high_open=True)
_WEIGHT = Limit(low=0, high=math.inf, high_open=True)
_SHARE = Limit(low=0, high=1)
_DECAY = Limit(low=0, high=1, high_open=True)
_PORT = Limit(low=0, high=65535)
_ANY = Limit(low_open=True, high_open=True)

_INT32 = 2**31 - 1
_INT64 = 2**63 - 1

LARGEST: Mapping[str, int] = {
    # Python, NumPy and torch all take seeds of 32 bits.
    "train.seed": 2**32 - 1,
    "train.max_tokens_per_gpu": _INT64,
    "rollout.max_tokens_per_gpu": _INT64,
    "push.bucket_bytes": _INT64,
}
"""Integers that may be larger than 32 bits with a sign, which is how the others travel."""

_OPTIMIZER: Mapping[str, Limit] = {
    "adam.lr": _WEIGHT,
    "adam.betas": _DECAY,
    "adam.eps": _POSITIVE,
    "adam.weight_decay": _WEIGHT,
    "muon.lr": _WEIGHT,
    "muon.momentum": _DECAY,
    "muon.ns_steps": _COUNT,
    "lr_warmup_ratio": _SHARE,
    "min_lr_ratio": _SHARE,
    "max_norm": _WEIGHT,
}

LIMITS: Mapping[str, Limit] = {
    **_OPTIMIZER,
    **{f"actor.{name}": limit for name, limit in _OPTIMIZER.items()},
    **{f"critic.{name}": limit for name, limit in _OPTIMIZER.items()},
    **{
        f"{role}.{count}": _COUNT
        for role in ("actor", "critic", "ref", "reward")
        for count in ("num_nodes", "num_gpus_per_node")
    },
    "actor.eps_clip": _POSITIVE,
    "actor.eps_clip_low_high": _POSITIVE,
    "actor.dual_clip": Limit(low=1, low_open=True),
    "actor.loss_agg_length": _COUNT,
    "actor.aux_loss_coef": _WEIGHT,
    "actor.entropy_coef": _WEIGHT,
    "model.aux_loss_coef": _WEIGHT,
    "model.beta": _POSITIVE,
    "model.label_smoothing": Limit(low=0, high=0.5, high_open=True),
    "model.nll_loss_coef": _WEIGHT,
    "critic.value_clip": _POSITIVE,
    "critic.freezing_steps": Limit(low=-1),
    "reward.clip_range": _ANY,
    "reward.overlong_buffer_len": _POSITIVE,
    "reward.overlong_penalty_factor": _WEIGHT,
    "reward.stop_properly_penalty_coef": Limit(high=1),
    "reward.timeout": _POSITIVE,
    "reward.num_workers": _COUNT,
    "reward.max_attempts": _COUNT,
    "vllm.num_engines": _COUNT,
    "vllm.tensor_parallel_size": _COUNT,
    "vllm.gpu_memory_utilization": Limit(low=0, low_open=True, high=1),
    "rollout.batch_size": _COUNT,
    "rollout.n_samples_per_prompt": _COUNT,
    "rollout.max_new_tokens": _COUNT,
    "rollout.temperature": _POSITIVE,
    "rollout.top_p": Limit(low=0, low_open=True, high=1),
    "rollout.top_k": _EVERY,
    "rollout.micro_batch_size": _COUNT,
    "rollout.max_tokens_per_gpu": _COUNT,
    "rollout.vllm_generate_batch_size": _COUNT,
    "rollout.max_num_sequences": _COUNT,
    "rollout.max_groups_in_flight": _COUNT,
    "algo.advantage.lambd": _SHARE,
    "algo.advantage.gamma": _SHARE,
    "algo.advantage.std_eps": _WEIGHT,
    "algo.advantage.is_correction_threshold": _WEIGHT,
    "algo.kl.init_coef": _WEIGHT,
    "algo.kl.target": _POSITIVE,
    "algo.kl.horizon": _COUNT,
    "algo.dynamic_filtering_range": _ANY,
    "train.batch_size": _COUNT,
    "train.micro_batch_size": _COUNT,
    "train.max_epochs": _COUNT,
    "train.max_steps": _COUNT,
    "train.num_episodes": _COUNT,
    "train.max_tokens_per_gpu": _COUNT,
    "train.async_queue_size": _COUNT,
    "train.max_staleness": _INDEX,
    "train.agent_timeout": _POSITIVE,
    "train.agent_num_workers": _COUNT,
    "train.agent_episodes_per_worker": _COUNT,
    "train.ema_beta": _DECAY,
    "train.seed": _INDEX,
    "data.max_len": Limit(low=2),
    "data.max_samples": _COUNT,
    "data.dataloader_num_workers": _INDEX,
    "data.max_images_per_prompt": _INDEX,
    "eval.steps": _EVERY,
    "eval.temperature": _WEIGHT,
    "eval.n_samples_per_prompt": _COUNT,
    "ds.zero_stage": Limit(low=0, high=3),
    "ds.zpg": _COUNT,
    "ds.tensor_parallel_size": _COUNT,
    "ds.ring_attn_size": _COUNT,
    "ds.ring_attn_head_stride": _COUNT,
    "ds.lora.rank": _INDEX,
    "ds.lora.alpha": _COUNT,
    "ds.lora.dropout": _DECAY,
    "ckpt.save_steps": _EVERY,
    "ckpt.max_num": _COUNT,
    "ckpt.max_mem": Limit(low=0, low_open=True),
    "logger.logging_steps": _COUNT,
    "learner.num_ranks": _COUNT,
    "launch.start_timeout": _POSITIVE,
    "launch.connect_timeout": _POSITIVE,
    "launch.max_restarts": _INDEX,
    "push.bucket_bytes": Limit(low=1024),
    "push.group_timeout": _POSITIVE,
    "rpc.port": _PORT,
    "rpc.drain_seconds": _WEIGHT,
    "rpc.max_concurrent_calls": _COUNT,
    "metrics.port": _PORT,
    "http.port": _PORT,
    "batch_size": _COUNT,
    "local_rank": _ANY,
}
"""Limits by dotted name; a name means the same in every command that has it."""

_REMEDIES: Mapping[str, str] = {
    "actor.dual_clip": "leave it away for no dual clip; 3 is usual",
    "critic.freezing_steps": "-1 freezes nothing",
    "eval.steps": "-1 leaves it to the method",
    "ckpt.save_steps": "-1 writes none",
    "rollout.top_k": "-1 keeps all tokens",
    "rollout.temperature": "1 is the model as it is; near 0 is nearly greedy",
    "vllm.num_engines": "generation needs an engine; leave the flag away for one",
    "algo.kl.target": "leave it away for a fixed KL coefficient",
    "reward.overlong_buffer_len": "leave it away for no overlong penalty",
}


def check_limits(config: Any) -> Iterator[ConfigError]:
    """Every number that lies outside its range, or is too large to be sent to a service."""
    for name in leaves(type(config)):
        limit = LIMITS.get(name)
        value = value_of(config, name)
        if limit is None or value is None:
            continue
        numbers = value if isinstance(value, tuple) else (value,)
        if not all(limit.admits(number) for number in numbers):
            remedy = _REMEDIES.get(
                name,
                f"give {'numbers that are' if len(numbers) > 1 else 'a number that is'} {limit}",
            )
            yield wrong(name, value, f"must be {limit}", remedy)
            continue
        largest = LARGEST.get(name, _INT32)
        if any(isinstance(number, int) and number > largest for number in numbers):
            yield wrong(name, value, "is too large", f"give at most {largest}")
