"""What a replica is asked before it gets work: all at the start of a run, others when they join."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from quartet.clients import Client, RefClient, ReplicaPool, RewardClient, RolloutClient
from quartet.config import PpoConfig, TrainerConfig
from quartet.errors import ConfigError
from quartet.trainer import checks
from quartet.types import LearnerInfo, RewardInfo, RolloutInfo

AnyClient = TypeVar("AnyClient", bound=Client)
Info = TypeVar("Info")


async def check_rollouts(
    config: PpoConfig, pool: ReplicaPool[RolloutClient], policy: LearnerInfo, fingerprint: str
) -> list[RolloutInfo]:
    """Check the rollout replicas that are there, and have the pool check those that join.

    Raises:
        ConfigError: one does not fit.
    """

    async def check(client: RolloutClient) -> RolloutInfo:
        info, address = await client.get_info(include_manifest=True), client.address
        checks.check_server(info.info, "rollout", address)
        if config.vllm.enable_sleep:
            checks.check_sleep(info.info, "rollout", address, flag="vllm.enable_sleep")
        checks.check_tokenizer(info.info, "rollout", address, fingerprint=fingerprint)
        checks.check_length(info.info, "rollout", address, max_len=config.data.max_len)
        checks.check_rollout(info, address)
        checks.check_manifests(policy.manifest, info, address)
        return info

    return await _check_all(pool, check)


async def check_references(
    config: TrainerConfig, pool: ReplicaPool[RefClient], fingerprint: str
) -> int:
    """Check the reference replicas that are there, and have the pool check those that join.

    Returns:
        How many there are.

    Raises:
        ConfigError: one does not fit.
    """

    async def check(client: RefClient) -> None:
        info, address = (await client.get_info()).info, client.address
        checks.check_server(info, "ref", address)
        checks.check_tokenizer(info, "ref", address, fingerprint=fingerprint)
        checks.check_length(info, "ref", address, max_len=config.data.max_len)

    return len(await _check_all(pool, check))


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreTerms:
    """What all Score calls of a run keep to."""

    with_token_ids: bool
    """Whether they carry token ids: they are of use to a replica."""
    max_samples: int
    """Most samples of a call; 0 is no limit."""


async def check_rewards(pool: ReplicaPool[RewardClient], fingerprint: str) -> ScoreTerms:
    """Check the reward replicas that are there, and have the pool check those that join.

    A reward model with the policy's tokenizer reads the ids as they are, though text would do.

    Raises:
        ConfigError: one does not fit.
    """

    async def check(client: RewardClient) -> RewardInfo:
        info = await client.get_info()
        checks.check_server(info.info, "reward", client.address)
        checks.check_reward(info, client.address, fingerprint=fingerprint)
        return info

    infos = await _check_all(pool, check)
    limits = [info.max_samples_per_call for info in infos if info.max_samples_per_call]
    reads_ids = any(i.needs_token_ids or i.info.tokenizer_fingerprint == fingerprint for i in infos)
    terms = ScoreTerms(with_token_ids=reads_ids, max_samples=min(limits, default=0))

    async def joins(client: RewardClient) -> None:
        info = await check(client)
        checks.check_score_terms(
            info,
            client.address,
            with_token_ids=terms.with_token_ids,
            max_samples=terms.max_samples,
        )

    pool.admit(check=joins)
    return terms


async def _check_all(
    pool: ReplicaPool[AnyClient], check: Callable[[AnyClient], Awaitable[Info]]
) -> list[Info]:
    """Have joining replicas checked, then check those that are there.

    Raises:
        ConfigError: one does not fit.
    """

    async def checked(client: AnyClient) -> None:
        await check(client)

    # First, so that nobody slips in between.
    pool.admit(check=checked)
    return list(await asyncio.gather(*(check(client) for client in pool.serving())))


async def wait_listed(role: str, pool: ReplicaPool[AnyClient], timeout: float) -> list[str]:
    """Wait for the replicas that a list names which may change. One is enough to begin with.

    Args:
        role: what they are, for messages.
        pool: where they are followed.
        timeout: seconds to wait for all of them.

    Returns:
        Addresses of those that do not serve yet.

    Raises:
        ConfigError: none serves in time.
    """

    def missing() -> list[str]:
        there = {client.address for client in pool.serving()}
        return [c.address for c in pool.clients if c.address not in there]

    try:
        async with asyncio.timeout(timeout):
            await pool.until(lambda: bool(pool.clients) and not missing())
    except TimeoutError:
        if not pool.serving():
            raise ConfigError(
                f"no {role} service at {', '.join(pool.entries)} after {timeout:.1f} s: "
                f"{pool.describe()}",
                reason="NOT_READY",
                field=f"{role}.address",
                value=",".join(pool.entries),
                remedy="start one, or mend the list",
            ) from None
    return missing()
