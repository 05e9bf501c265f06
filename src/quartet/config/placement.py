"""Which services the trainer starts, and on which GPUs. The plan shows it, the launcher does it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quartet.config.derive import (
    needs_critic,
    needs_ref,
    num_engines,
    num_ranks,
    split_list,
    uses_agent,
)
from quartet.config.machine import Machine
from quartet.config.methods import DpoConfig, PpoConfig, TrainerConfig
from quartet.config.rewardparts import targets_of
from quartet.config.services import Role

Gpus = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """One service process group."""

    role: Role
    name: str
    """Role, with a number where there are several: rollout-1."""
    ranks: int = 1
    """Processes that work as one."""
    gpus: Gpus = ()
    """GPUs of this machine; none on the CPU."""
    address: str | None = None
    """Given address; None is started by the trainer."""


class _Allocator:
    """Hands out GPUs in order."""

    def __init__(self, *, on_gpus: bool) -> None:
        self._next = 0
        self._on_gpus = on_gpus

    def take(self, count: int) -> Gpus:
        """The next `count` GPUs; none on a machine without."""
        if not self._on_gpus:
            return ()
        self._next += count
        return tuple(range(self._next - count, self._next))


def places(config: TrainerConfig, machine: Machine) -> tuple[Place, ...]:
    """All services of a run, in the order of their start."""
    allocator = _Allocator(on_gpus=machine.num_gpus > 0)
    if isinstance(config, PpoConfig):
        return _ppo_places(config, machine, allocator)
    ranks = num_ranks(config, machine)
    learner = _place("learner", config.learner.address, ranks, lambda: allocator.take(ranks))
    if not isinstance(config, DpoConfig):
        return learner
    # DPO's frozen model works in turns with the learner, so it shares the learner's first GPU.
    return learner + _place("ref", config.ref.address, 1, lambda: learner[0].gpus[:1])


def gpus_needed(config: TrainerConfig, machine: Machine) -> int:
    """GPUs that the services started by the trainer use."""
    used = [gpu for place in places(config, machine) for gpu in place.gpus]
    return max(used, default=-1) + 1


def _ppo_places(config: PpoConfig, machine: Machine, allocator: _Allocator) -> tuple[Place, ...]:
    """Policy, critic, ref, reward and engines; colocation decides who shares."""
    colocate = config.train.colocate_all
    found: list[Place] = []
    ranks = num_ranks(config, machine)
    found += _place("learner", config.learner.address, ranks, lambda: allocator.take(ranks))
    actor = found[0].gpus

    critic: Gpus = ()
    if needs_critic(config):
        width = num_ranks(config, machine, "critic")
        found += _place(
            "critic",
            config.critic.address,
            width,
            lambda: actor if colocate else allocator.take(width),
        )
        critic = found[-1].gpus
    if needs_ref(config):
        count = config.ref.num_nodes * config.ref.num_gpus_per_node
        shared = actor if colocate or config.train.colocate_actor_ref else None
        found += _replicas("ref", config.ref.address, shared, count, allocator)
    if not uses_agent(config):
        found += _rewards(config, actor, critic, allocator)
    shared = actor if colocate and not config.train.async_enable else None
    return tuple(found) + _engines(config, shared, allocator)


def _rewards(
    config: PpoConfig, actor: Gpus, critic: Gpus, allocator: _Allocator
) -> tuple[Place, ...]:
    """Whatever gives the rewards."""
    rules = config.reward.remote_url or config.reward.parts
    if config.reward.address or (rules and not targets_of(config.reward.parts, "model")):
        # Rules and endpoints need no GPU.
        return _place("reward", config.reward.address, 1, tuple)
    count = config.reward.num_nodes * config.reward.num_gpus_per_node
    shared = actor if config.train.colocate_all else None
    if shared is None and config.train.colocate_critic_reward and critic:
        shared = critic
    return _replicas("reward", None, shared, count, allocator)


def _place(
    role: Role, address: str | None, ranks: int, take: Callable[[], Gpus]
) -> tuple[Place, ...]:
    """A service under one address, given or to be started."""
    if address:
        return tuple(
            Place(role=role, name=_numbered(role, index, len(entries)), address=entry)
            for entries in [split_list(address)]
            for index, entry in enumerate(entries)
        )
    return (Place(role=role, name=role, ranks=ranks, gpus=take()),)


def _replicas(
    role: Role, address: str | None, shared: Gpus | None, count: int, allocator: _Allocator
) -> tuple[Place, ...]:
    """One replica on each GPU; a single one on the CPU."""
    if address:
        return _place(role, address, 1, tuple)
    gpus = allocator.take(count) if shared is None else shared
    if not gpus:
        return (Place(role=role, name=role),)
    return tuple(
        Place(role=role, name=_numbered(role, index, len(gpus)), gpus=(gpu,))
        for index, gpu in enumerate(gpus)
    )


def _engines(config: PpoConfig, shared: Gpus | None, allocator: _Allocator) -> tuple[Place, ...]:
    """Rollout engines, each on `vllm.tensor_parallel_size` GPUs."""
    if config.rollout.address:
        return _place("rollout", config.rollout.address, 1, tuple)
    count, width = num_engines(config), config.vllm.tensor_parallel_size
    if config.rollout.engine == "openai":
        shared = ()  # the GPUs are its server's
    pool = allocator.take(count * width) if shared is None else shared
    return tuple(
        Place(
            role="rollout",
            name=_numbered("rollout", index, count),
            gpus=pool[index * width : (index + 1) * width],
        )
        for index in range(count)
    )


def _numbered(role: str, index: int, count: int) -> str:
    return role if count == 1 else f"{role}-{index}"
