"""Which services a run needs, which of them are started here, and how all of them are reached."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, TypeVar

from quartet.clients import (
    Client,
    LearnerClient,
    RefClient,
    ReplicaPool,
    RewardClient,
    RolloutClient,
)
from quartet.config import DpoConfig, PpoConfig, TrainerConfig
from quartet.config.derive import engine_python, forward_token_budget, push_backend
from quartet.config.files import to_yaml
from quartet.config.machine import this_machine
from quartet.config.placement import Place, places
from quartet.config.rpc import RpcConfig
from quartet.config.services import Role, serve_config_for
from quartet.errors import ConfigError, UnavailableError
from quartet.obs.progress import Phase
from quartet.trainer import checks
from quartet.trainer.adapters import PooledJudge, PooledReference, PooledSampler, RemoteTrainee
from quartet.trainer.launch import LocalService
from quartet.trainer.outages import longer_wait, way_on
from quartet.trainer.replicas import (
    ScoreTerms,
    check_references,
    check_rewards,
    check_rollouts,
    wait_listed,
)
from quartet.trainer.rooms import Players
from quartet.trainer.run import Run
from quartet.types import Head, LearnerInfo, PushBackend, RolloutInfo

RESTARTED = ("rollout", "reward", "ref")
"""Roles that hold nothing but what they loaded or get in the next push."""

log = logging.getLogger(__name__)

MAX_GROUPS_IN_FLIGHT = 256
"""Prompt groups under way where neither flags nor services say less."""

AnyClient = TypeVar("AnyClient", bound=Client)


def local_services(config: TrainerConfig) -> list[LocalService]:
    """The services that have no address and are started on this machine."""
    found = places(config, this_machine())
    return [
        LocalService(
            role=place.name,
            room="learner" if place.role == "critic" else place.role,
            settings=to_yaml(serve_config_for(place.role, config, _index(place, found))),
            python=(engine_python(config) if place.role == "rollout" else None) or sys.executable,
            env=_environment(place.gpus) | _secrets(place.role, config),
            max_restarts=config.launch.max_restarts if place.role in RESTARTED else 0,
            remedy=way_on(config),
        )
        for place in found
        if not place.address
    ]


def all_addresses(config: TrainerConfig, started: Mapping[str, str]) -> dict[Role, tuple[str, ...]]:
    """Addresses of every role's replicas: as given, or as started."""
    found: dict[Role, tuple[str, ...]] = {}
    for place in places(config, this_machine()):
        address = place.address or started[place.name]
        found[place.role] = (*found.get(place.role, ()), address)
    return found


async def connect_learner(
    config: TrainerConfig, run: Run, stack: AsyncExitStack, *, head: Head, fingerprint: str
) -> RemoteTrainee:
    """Reach the one learner of SFT or RM, and check it. The client is closed with `stack`.

    Raises:
        ConfigError: nobody serves there in time, or the service does not fit.
    """
    (address,) = all_addresses(config, run.launcher.addresses)["learner"]
    client = await stack.enter_async_context(LearnerClient(address, _rpc(config)))
    await _connect(config, run, {"learner": client}, {})
    _check_learner(config, await client.get_info(), "learner", address, head, fingerprint)
    return RemoteTrainee(client)


async def connect_dpo(
    config: DpoConfig, run: Run, stack: AsyncExitStack, *, fingerprint: str
) -> tuple[RemoteTrainee, PooledReference]:
    """Reach learner and reference model of DPO, and check them. Closed with `stack`.

    Raises:
        ConfigError: nobody serves at an address in time, or a service does not fit.
    """
    addresses = all_addresses(config, run.launcher.addresses)
    client = await stack.enter_async_context(LearnerClient(addresses["learner"][0], _rpc(config)))
    references = await _open_pool(RefClient, addresses["ref"], config, run, stack)
    await _connect(config, run, {"learner": client}, {"ref": references})
    info = await client.get_info()
    _check_learner(config, info, "learner", client.address, Head.LM, fingerprint)
    await check_references(config, references, fingerprint)
    return RemoteTrainee(client), PooledReference(references)


async def connect_ppo(
    config: PpoConfig, run: Run, stack: AsyncExitStack, *, fingerprint: str
) -> Players:
    """Reach all services of PPO, and check that they fit each other. Closed with `stack`.

    Raises:
        ConfigError: nobody serves at an address in time, or a service does not fit.
    """
    addresses = all_addresses(config, run.launcher.addresses)
    rpc = _rpc(config)
    policy = await stack.enter_async_context(LearnerClient(addresses["learner"][0], rpc))
    rollouts = await _open_pool(RolloutClient, addresses["rollout"], config, run, stack)
    learners = {"learner": policy}
    pools: dict[str, ReplicaPool[Any]] = {"rollout": rollouts}
    critic = references = rewards = None
    if "critic" in addresses:
        critic = await stack.enter_async_context(LearnerClient(addresses["critic"][0], rpc))
        learners["critic"] = critic
    if "ref" in addresses:
        references = await _open_pool(RefClient, addresses["ref"], config, run, stack)
        pools["ref"] = references
    if "reward" in addresses:
        rewards = await _open_pool(RewardClient, addresses["reward"], config, run, stack)
        pools["reward"] = rewards
    await _connect(config, run, learners, pools)

    policy_info = await policy.get_info()
    _check_learner(config, policy_info, "learner", policy.address, Head.LM, fingerprint)
    if critic is not None:
        info = await critic.get_info()
        _check_learner(config, info, "critic", critic.address, Head.VALUE, fingerprint)
    rollout_infos = await check_rollouts(config, rollouts, policy_info, fingerprint)
    num_references, terms = 1, ScoreTerms(with_token_ids=False, max_samples=0)
    if references is not None:
        num_references = await check_references(config, references, fingerprint)
    if rewards is not None:
        terms = await check_rewards(rewards, fingerprint)
    tokens = forward_token_budget(config)
    return Players(
        sampler=PooledSampler(rollouts, sleeps=config.vllm.enable_sleep),
        judge=PooledJudge(rewards) if rewards is not None else None,
        policy=RemoteTrainee(
            policy,
            forward_tokens=tokens,
            backend=_backend(config),
            bucket_bytes=config.push.bucket_bytes,
            group_timeout=config.push.group_timeout,
            push_folder=str(run.folder.absolute() / "push"),
        ),
        reference=(
            PooledReference(references, max_tokens_per_micro_batch=tokens) if references else None
        ),
        critic=RemoteTrainee(critic, forward_tokens=tokens) if critic is not None else None,
        policy_version=max(i.policy_version for i in (policy_info, *rollout_infos)),
        num_references=num_references,
        max_groups_in_flight=_groups_in_flight(rollout_infos),
        judge_wants_token_ids=terms.with_token_ids,
        judge_max_samples=terms.max_samples,
    )


async def _open_pool(
    client_class: type[AnyClient],
    addresses: Sequence[str],
    config: TrainerConfig,
    run: Run,
    stack: AsyncExitStack,
) -> ReplicaPool[AnyClient]:
    """The replicas of a role, followed from now on. Closed with `stack`.

    Raises:
        ConfigError: a file of addresses cannot be read.
    """
    patience, remedy = _patience(config, run)
    pool = ReplicaPool(
        client_class,
        addresses,
        _rpc(config),
        patience=patience,
        say=run.progress.say,
        remedy=remedy,
    )
    await stack.enter_async_context(pool)
    await pool.open()
    return pool


def _patience(config: TrainerConfig, run: Run) -> tuple[float, str]:
    """Seconds to wait for a replica of a pool to come back, and what helps where it does not."""
    patience, flag = config.launch.connect_timeout, "launch.connect_timeout"
    # A service of ours that died is being started again: that takes as long as a start.
    if run.launcher.pids and config.launch.start_timeout > patience:
        patience, flag = config.launch.start_timeout, "launch.start_timeout"
    return patience, f"{way_on(config)}; {longer_wait(flag, patience)}"


async def _connect(
    config: TrainerConfig,
    run: Run,
    learners: Mapping[str, LearnerClient],
    pools: Mapping[str, ReplicaPool[Any]],
) -> None:
    """Wait for all services of a run, and say so."""
    timeout = config.launch.connect_timeout
    waits: list[tuple[str, Callable[[], Awaitable[None]]]] = []
    for role, learner in learners.items():
        wait = partial(_wait, role, learner.address, lambda c=learner: c.wait_ready(timeout))
        waits.append((f"{role} at {learner.address}", wait))
    for role, pool in pools.items():
        if pool.may_change:
            wait = partial(_wait_listed, run, role, pool, timeout)
            waits.append((f"{role} at {', '.join(pool.entries)}", wait))
            continue
        for client in pool.clients:
            ready = partial(pool.wait_for, client, timeout)
            wait = partial(_wait, role, client.address, ready)
            waits.append((f"{role} at {client.address}", wait))
    with run.progress.phase("connect", total=len(waits), unit="services") as phase:
        await _wait_all(waits, timeout, phase)


async def _wait_all(
    waits: Sequence[tuple[str, Callable[[], Awaitable[None]]]], timeout: float, phase: Phase
) -> None:
    """Wait for services, and name in `phase` those that are not there yet."""
    missing = [name for name, _ in waits]

    def show() -> None:
        phase.waiting_for = f"{', '.join(missing)}, at most {timeout:g} s" if missing else ""

    async def one(name: str, wait: Callable[[], Awaitable[None]]) -> None:
        await wait()
        missing.remove(name)
        phase.advance()
        show()

    show()
    async with asyncio.TaskGroup() as tasks:
        for name, wait in waits:
            tasks.create_task(one(name, wait))


async def _wait_listed(run: Run, role: str, pool: ReplicaPool[Any], timeout: float) -> None:
    """Wait for replicas that may change, and say who is to come."""
    for address in await wait_listed(role, pool, timeout):
        run.progress.say(f"{role} at {address} does not serve yet; it joins when it does")


async def _wait(role: str, address: str, ready: Callable[[], Awaitable[None]]) -> None:
    """Wait for one service; nobody there is the user's to mend."""
    try:
        await ready()
    except (UnavailableError, ConfigError) as error:
        raise ConfigError(
            error.message,
            reason=error.info.reason,
            field=f"{role}.address",
            value=address,
            remedy=error.info.remedy,
        ) from error


def _check_learner(
    config: TrainerConfig, info: LearnerInfo, role: str, address: str, head: Head, fingerprint: str
) -> None:
    checks.check_server(info.info, role, address)
    if isinstance(config, PpoConfig) and config.ds.enable_sleep:
        checks.check_sleep(info.info, role, address, flag="ds.enable_sleep")
    checks.check_head(info, role, address, head=head)
    checks.check_tokenizer(info.info, role, address, fingerprint=fingerprint)
    checks.check_length(info.info, role, address, max_len=config.data.max_len)


def _groups_in_flight(infos: list[RolloutInfo]) -> int:
    """What the replicas together take at once, as far as they say."""
    limits = [info.info.max_concurrent_calls for info in infos]
    return sum(limits) if limits and all(limits) else MAX_GROUPS_IN_FLIGHT


def _backend(config: PpoConfig) -> PushBackend | None:
    """The push backend, None where the learner is to look."""
    name, why = push_backend(config, this_machine())
    log.info("weights are pushed by %s: %s", name, why)
    return None if name == "auto" else PushBackend(name)


def _rpc(config: TrainerConfig) -> RpcConfig:
    """How services are called."""
    return RpcConfig(insecure=config.rpc.insecure)


def _index(place: Place, found: Sequence[Place]) -> int:
    """Which of its role's replicas a place is."""
    return [other for other in found if other.role == place.role].index(place)


def _secrets(role: Role, config: TrainerConfig) -> dict[str, str]:
    """What a service must know and no file may hold, as variables of its environment."""
    if role == "rollout" and isinstance(config, PpoConfig) and config.rollout.server_key:
        return {"QUARTET_ROLLOUT__SERVER_KEY": config.rollout.server_key}
    return {}


def _environment(gpus: Sequence[int]) -> dict[str, str]:
    """Variables of a service: its GPUs; on a CPU one thread, because there are several services."""
    common = {"TOKENIZERS_PARALLELISM": "false"}
    if gpus:
        return common | {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))}
    return common | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
