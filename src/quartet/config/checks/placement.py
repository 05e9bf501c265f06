"""Which processes get which GPUs, and how a learner's ranks are grouped."""

from __future__ import annotations

from collections.abc import Iterator

from quartet.config.derive import needs_critic, needs_ref, num_engines, uses_agent
from quartet.config.methods import PpoConfig, TrainerConfig
from quartet.config.tree import value_of, wrong
from quartet.errors import ConfigError


def check_placement(config: PpoConfig) -> Iterator[ConfigError]:
    """Groups of GPUs that several models share."""
    sizes = {
        role: section.num_nodes * section.num_gpus_per_node
        for role, section in (
            ("actor", config.actor),
            ("critic", config.critic),
            ("ref", config.ref),
            ("reward", config.reward),
        )
    }
    shared = list[tuple[str, str, str]]()
    if needs_ref(config) and (config.train.colocate_actor_ref or config.train.colocate_all):
        flag = "colocate_all" if config.train.colocate_all else "colocate_actor_ref"
        shared.append((flag, "actor", "ref"))
    if config.train.colocate_critic_reward and needs_critic(config) and not uses_agent(config):
        shared.append(("colocate_critic_reward", "critic", "reward"))
    if config.train.colocate_all and needs_critic(config):
        shared.append(("colocate_all", "actor", "critic"))
    for flag, first, second in shared:
        if sizes[first] != sizes[second]:
            yield wrong(
                f"{second}.num_gpus_per_node",
                sizes[second],
                f"with --train.{flag} {first} and {second} share GPUs, but {first} has "
                f"{sizes[first]} and {second} {sizes[second]}",
                "make num_nodes and num_gpus_per_node the same",
            )
    yield from _check_engines(config, sizes["actor"])


def _check_engines(config: PpoConfig, actor_gpus: int) -> Iterator[ConfigError]:
    engines, width = num_engines(config), config.vllm.tensor_parallel_size
    if (
        config.train.colocate_all
        and not config.train.async_enable
        and not config.rollout.address
        and config.rollout.engine != "openai"
        and engines * width != actor_gpus
    ):
        yield wrong(
            "vllm.num_engines",
            engines,
            f"with --train.colocate_all the engines share the policy's {actor_gpus} GPUs, but "
            f"{engines} engines x {width} GPUs are {engines * width}",
            "make vllm.num_engines x vllm.tensor_parallel_size equal to actor.num_nodes x "
            "actor.num_gpus_per_node",
        )
    for name, who in (("vllm.enable_sleep", "an engine"), ("ds.enable_sleep", "a model")):
        if value_of(config, name) and not config.train.colocate_all:
            yield wrong(
                name,
                None,
                f"{who} sleeps to leave its GPU to others, and without colocation there are none",
                "add --train.colocate_all, or leave the flag away",
            )
    if config.vllm.sync_backend not in ("nccl", "gloo"):
        yield wrong(
            "vllm.sync_backend",
            config.vllm.sync_backend,
            "is no way for weights to travel",
            "leave the flag away; --push.backend forces one",
        )


def check_parallelism(config: TrainerConfig) -> Iterator[ConfigError]:
    """Ring and tensor groups against the learner's ranks; ZeRO++ against ZeRO."""
    ds = config.ds
    group = ds.ring_attn_size * ds.tensor_parallel_size
    for role, world in _worlds(config):
        if world % group:
            name = "ds.ring_attn_size" if ds.ring_attn_size > 1 else "ds.tensor_parallel_size"
            yield wrong(
                name,
                group,
                f"{world} ranks of {role} cannot be cut into groups of {group}",
                "make ring_attn_size x tensor_parallel_size divide the number of ranks",
            )
        if world % ds.zpg:
            yield wrong(
                "ds.zpg",
                ds.zpg,
                f"{world} ranks of {role} cannot be cut into groups of {ds.zpg}",
                "take a divisor of the number of ranks",
            )
    if ds.zpg > 1 and ds.zero_stage != 3:
        yield wrong(
            "ds.zpg",
            ds.zpg,
            f"a second partition of the weights needs a first, and ZeRO stage {ds.zero_stage} has "
            "none",
            "add --ds.zero_stage 3",
        )
    if ds.grad_accum_dtype not in (None, "fp32", "bf16", "fp16"):
        yield wrong(
            "ds.grad_accum_dtype",
            ds.grad_accum_dtype,
            "is no type that DeepSpeed knows",
            "take fp32, bf16 or fp16",
        )


def _worlds(config: TrainerConfig) -> Iterator[tuple[str, int]]:
    """Learners and their ranks, as far as the configuration says it."""
    if config.learner.num_ranks is not None:
        yield "learner", config.learner.num_ranks
    elif isinstance(config, PpoConfig):
        yield "actor", config.actor.num_nodes * config.actor.num_gpus_per_node
        if needs_critic(config):
            yield "critic", config.critic.num_nodes * config.critic.num_gpus_per_node
