"""Which services a run needs, which of them are started here, and how all of them are reached."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import TypeVar

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
from quartet.trainer.rooms import Players
from quartet.trainer.run import Run
from quartet.types import Head, LearnerInfo, PushBackend, RolloutInfo

RESTARTED = ("rollout", "reward", "ref")
"""Roles that hold nothing but what they loaded or get in the next push."""

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
    await _connect(config, run, [("learner", client)])
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
    patience, remedy = _patience(config, run)
    references = await stack.enter_async_context(
        ReplicaPool(
            RefClient,
            addresses["ref"],
            _rpc(config),
            patience=patience,
            say=run.progress.say,
            remedy=remedy,
        )
    )
    await _connect(
        config, run, [("learner", client), *(("ref", each) for each in references.clients)]
    )
    info = await client.get_info()
    _check_learner(config, info, "learner", client.address, Head.LM, fingerprint)
    await _check_references(config, references, fingerprint)
    return RemoteTrainee(client), PooledReference(references)


async def connect_ppo(
    config: PpoConfig, run: Run, stack: AsyncExitStack, *, fingerprint: str
) -> Players:
    """Reach all services of PPO, and check that they fit each other. Closed with `stack`.

    Raises:
        ConfigError: nobody serves at an address in time, or a service does not fit.
    """
    patience, remedy = _patience(config, run)
    addresses = all_addresses(config, run.launcher.addresses)
    rpc = _rpc(config)

    async def pool(client_class: type[AnyClient], role: Role) -> ReplicaPool[AnyClient]:
        made = ReplicaPool(
            client_class,
            addresses[role],
            rpc,
            patience=patience,
            say=run.progress.say,
            remedy=remedy,
        )
        return await stack.enter_async_context(made)

    policy = await stack.enter_async_context(LearnerClient(addresses["learner"][0], rpc))
    rollouts = await pool(RolloutClient, "rollout")
    critic = references = rewards = None
    if "reward" in addresses:
        rewards = await pool(RewardClient, "reward")
    if "critic" in addresses:
        critic = await stack.enter_async_context(LearnerClient(addresses["critic"][0], rpc))
    if "ref" in addresses:
        references = await pool(RefClient, "ref")

    waited: list[tuple[str, Client]] = [("learner", policy)]
    waited += [("critic", critic)] if critic else []
    waited += [("rollout", c) for c in rollouts.clients]
    waited += [("ref", c) for c in references.clients] if references else []
    waited += [("reward", c) for c in rewards.clients] if rewards else []
    await _connect(config, run, waited)

    policy_info = await policy.get_info()
    _check_learner(config, policy_info, "learner", policy.address, Head.LM, fingerprint)
    if critic is not None:
        info = await critic.get_info()
        _check_learner(config, info, "critic", critic.address, Head.VALUE, fingerprint)
    rollout_infos = await _check_rollouts(config, rollouts, policy_info, fingerprint)
    if references is not None:
        await _check_references(config, references, fingerprint)
    wants_ids, max_samples = False, 0
    if rewards is not None:
        wants_ids, max_samples = await _check_rewards(rewards, fingerprint)
    tokens = forward_token_budget(config)
    return Players(
        sampler=PooledSampler(rollouts, patience=patience if run.launcher.pids else 0.0),
        judge=PooledJudge(rewards) if rewards is not None else None,
        policy=RemoteTrainee(
            policy,
            forward_tokens=tokens,
            rollout_addresses=addresses["rollout"],
            backend=_backend(config),
            bucket_bytes=config.push.bucket_bytes,
            group_timeout=config.push.group_timeout,
            push_folder=str(run.folder.absolute() / "push"),
        ),
        reference=(
            PooledReference(references, max_tokens_per_micro_batch=tokens) if references else None
        ),
        critic=RemoteTrainee(critic, forward_tokens=tokens) if critic is not None else None,
        policy_version=max(
            policy_info.policy_version, *(info.policy_version for info in rollout_infos)
        ),
        num_references=len(references.clients) if references else 1,
        max_groups_in_flight=_groups_in_flight(rollout_infos),
        judge_wants_token_ids=wants_ids,
        judge_max_samples=max_samples,
    )


def _patience(config: TrainerConfig, run: Run) -> tuple[float, str]:
    """Seconds to wait for a replica of a pool to come back, and what helps where it does not."""
    patience, flag = config.launch.connect_timeout, "launch.connect_timeout"
    # A service of ours that died is being started again: that takes as long as a start.
    if run.launcher.pids and config.launch.start_timeout > patience:
        patience, flag = config.launch.start_timeout, "launch.start_timeout"
    return patience, f"{way_on(config)}; {longer_wait(flag, patience)}"


async def _connect(config: TrainerConfig, run: Run, waited: Sequence[tuple[str, Client]]) -> None:
    """Wait for all services of a run, and say so."""
    with run.progress.phase("connect", total=len(waited), unit="services") as phase:
        await _wait_all(waited, config.launch.connect_timeout, phase)


async def _wait_all(waited: Sequence[tuple[str, Client]], timeout: float, phase: Phase) -> None:
    """Wait for services, and name in `phase` those that are not there yet."""
    missing = [f"{role} at {client.address}" for role, client in waited]

    def show() -> None:
        phase.waiting_for = f"{', '.join(missing)}, at most {timeout:g} s" if missing else ""

    async def wait(role: str, client: Client) -> None:
        await _wait(role, client, timeout)
        missing.remove(f"{role} at {client.address}")
        phase.advance()
        show()

    show()
    async with asyncio.TaskGroup() as tasks:
        for role, client in waited:
            tasks.create_task(wait(role, client))


async def _wait(role: str, client: Client, timeout: float) -> None:
    """Wait for one service; nobody there is the user's to mend."""
    try:
        await client.wait_ready(timeout)
    except (UnavailableError, ConfigError) as error:
        raise ConfigError(
            error.message,
            reason=error.info.reason,
            field=f"{role}.address",
            value=client.address,
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


async def _check_rollouts(
    config: PpoConfig, pool: ReplicaPool[RolloutClient], policy: LearnerInfo, fingerprint: str
) -> list[RolloutInfo]:
    infos = await pool.each(lambda client: client.get_info(include_manifest=True))
    for client, info in zip(pool.clients, infos, strict=True):
        checks.check_server(info.info, "rollout", client.address)
        if config.vllm.enable_sleep:
            checks.check_sleep(info.info, "rollout", client.address, flag="vllm.enable_sleep")
        checks.check_tokenizer(info.info, "rollout", client.address, fingerprint=fingerprint)
        checks.check_length(info.info, "rollout", client.address, max_len=config.data.max_len)
        checks.check_rollout(info, client.address)
        checks.check_manifests(policy.manifest, info, client.address)
    return infos


async def _check_references(
    config: TrainerConfig, pool: ReplicaPool[RefClient], fingerprint: str
) -> None:
    infos = await pool.each(lambda client: client.get_info())
    for client, answer in zip(pool.clients, infos, strict=True):
        checks.check_server(answer.info, "ref", client.address)
        checks.check_tokenizer(answer.info, "ref", client.address, fingerprint=fingerprint)
        checks.check_length(answer.info, "ref", client.address, max_len=config.data.max_len)


async def _check_rewards(pool: ReplicaPool[RewardClient], fingerprint: str) -> tuple[bool, int]:
    """Whether token ids are of use, and how many samples a call may carry (0: any).

    A reward model with the policy's tokenizer reads the ids as they are, though text would do.
    """
    infos = await pool.each(lambda client: client.get_info())
    for client, info in zip(pool.clients, infos, strict=True):
        checks.check_server(info.info, "reward", client.address)
        checks.check_reward(info, client.address, fingerprint=fingerprint)
    limits = [info.max_samples_per_call for info in infos if info.max_samples_per_call]
    reads_ids = any(i.needs_token_ids or i.info.tokenizer_fingerprint == fingerprint for i in infos)
    return reads_ids, min(limits, default=0)


def _groups_in_flight(infos: list[RolloutInfo]) -> int:
    """What the replicas together take at once, as far as they say."""
    limits = [info.info.max_concurrent_calls for info in infos]
    return sum(limits) if all(limits) else MAX_GROUPS_IN_FLIGHT


def _backend(config: PpoConfig) -> PushBackend | None:
    """The push backend, None where the learner is to look."""
    name, _ = push_backend(config, this_machine())
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
