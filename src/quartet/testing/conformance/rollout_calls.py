"""Calls and numbers that the rollout suite is made of."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np

from quartet import codec
from quartet.api.rollout.v1.rollout_service_pb2_grpc import RolloutServiceStub
from quartet.clients.rollout import RolloutClient
from quartet.config.rpc import RpcConfig
from quartet.rpc.channel import create_channel
from quartet.rpc.errors import from_rpc_error
from quartet.testing.conformance import Skipped, require
from quartet.types import (
    Completion,
    GenerateRequest,
    GenerateResult,
    LogprobKind,
    PromptGroup,
    PushBackend,
    SamplingParams,
)

if TYPE_CHECKING:
    import torch

PATIENCE_SECONDS = 120.0
"""Longest wait for an answer that has to come."""
DEADLINE_SECONDS = 0.3
"""Time in which nothing should happen, and deadline of a call that takes longer."""
POLL_SECONDS = 0.02
LENGTHY_TOKENS = 96
"""Tokens of a completion that other calls can meet in its middle."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutSubject:
    """A server, and what it can be asked."""

    address: str
    rpc: RpcConfig | None = None
    prompts: tuple[tuple[int, ...], ...] = ((5, 6, 7, 8), (9,), tuple(range(10, 40)))
    """At least two prompts of its vocabulary, each far shorter than its context."""
    reference: str = ""
    """Folder of the model that it serves, to compare with; empty compares with nothing."""
    logprob_tolerance: float = 1e-4
    """Largest difference from the reference's log-probabilities: 1e-4 for fp32, 0.3 for bf16."""
    is_repeatable: bool = True
    """The same seed gives the same tokens, whoever else is there (true of fp32)."""
    is_exclusive: bool = False
    """Nobody else uses it, so it may be paused, put to sleep, filled with calls, and pushed to. It
    gets its own weights back, under a higher version."""
    weights: Callable[[], Mapping[str, torch.Tensor]] | None = None
    """The weights that it was started with, by name, where there is no reference that has them."""
    push_backend: PushBackend | None = None
    """How the suite pushes; None takes gloo, else file."""
    push_folder: str = ""
    """Folder that the server sees too, for pushes by file; empty makes one on this machine."""

    def groups(self, samples: int = 1, first_seed: int = 1) -> tuple[PromptGroup, ...]:
        """One group a prompt, with seeds."""
        return tuple(
            PromptGroup(
                group_id=f"group-{i}",
                prompt_token_ids=prompt,
                num_samples=samples,
                seeds=tuple(range(first_seed, first_seed + samples)),
                sample_ids=tuple(f"group-{i}-{s}" for s in range(samples)),
            )
            for i, prompt in enumerate(self.prompts)
        )


def new_id() -> str:
    """A request_id that was never used."""
    return f"conformance-{uuid.uuid4().hex}"


@asynccontextmanager
async def client_of(subject: RolloutSubject) -> AsyncIterator[RolloutClient]:
    """A client that tries everything once."""
    async with RolloutClient(subject.address, subject.rpc, retry=False) as client:
        yield client


async def call(
    subject: RolloutSubject, request: GenerateRequest, *, timeout: float = PATIENCE_SECONDS
) -> GenerateResult:
    """Send a request as it is, also one that the client class would not make.

    Raises:
        QuartetError: What the server's status means.
    """
    async with create_channel(subject.address, subject.rpc, retry=False) as channel:
        stub: Any = RolloutServiceStub(channel)
        try:
            answer = await stub.Generate(codec.encode_generate_request(request), timeout=timeout)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, subject.address) from error
    return codec.decode_generate_result(answer)


async def generate(
    subject: RolloutSubject,
    groups: Sequence[PromptGroup],
    sampling: SamplingParams | None = None,
    *,
    kind: LogprobKind | None = None,
    min_policy_version: int | None = None,
    isolated: bool = False,
) -> GenerateResult:
    """Complete prompts under a new request_id."""
    request = GenerateRequest(
        request_id=new_id(),
        groups=tuple(groups),
        sampling=sampling or SamplingParams(max_new_tokens=8),
        logprob_kind=kind or (await kinds_of(subject))[0],
        min_policy_version=min_policy_version,
        isolated=isolated,
    )
    return await call(subject, request)


async def request_for(
    subject: RolloutSubject, groups: Sequence[PromptGroup], sampling: SamplingParams
) -> GenerateRequest:
    """A request under a new id, for log-probabilities that the server offers."""
    return GenerateRequest(
        request_id=new_id(),
        groups=tuple(groups),
        sampling=sampling,
        logprob_kind=(await kinds_of(subject))[0],
    )


async def endless(subject: RolloutSubject) -> GenerateRequest:
    """Fills the context with several samples: the longest that can be asked for."""
    groups = subject.groups(samples=4)[:1]
    return await request_for(subject, groups, SamplingParams(ignore_eos=True))


async def lengthy(subject: RolloutSubject, *, samples: int = 1, seed: int = 1) -> GenerateRequest:
    """One prompt, and as many tokens as take a while and no longer than the context."""
    async with client_of(subject) as client:
        most = (await client.get_info()).info.max_sequence_length or 2 * LENGTHY_TOKENS
    sampling = SamplingParams(
        max_new_tokens=min(LENGTHY_TOKENS, most - len(subject.prompts[0])), ignore_eos=True
    )
    groups = subject.groups(samples=samples, first_seed=seed)[:1]
    return await request_for(subject, groups, sampling)


async def until_in_flight(client: RolloutClient, call: asyncio.Future[GenerateResult]) -> None:
    """Return when the engine has begun with a call.

    Raises:
        Skipped: The call was done before that was seen.
    """
    while not (await client.get_info()).completions_in_flight:
        if call.done():
            call.result()  # its failure is the check's
            raise Skipped("it completes a call before anything can happen in its middle")
        await asyncio.wait({call}, timeout=POLL_SECONDS / 4)


async def given_up(call: asyncio.Future[GenerateResult]) -> None:
    """Cancel a call that a check has no more use for."""
    call.cancel()
    await asyncio.wait({call})


def require_exclusive(subject: RolloutSubject) -> None:
    """Raise Skipped where the check would be in the way of others."""
    if not subject.is_exclusive:
        raise Skipped("others may be using it")


async def kinds_of(subject: RolloutSubject) -> tuple[LogprobKind, ...]:
    """Log-probabilities that it offers."""
    async with client_of(subject) as client:
        info = await client.get_info()
    require(info.logprob_kinds, f"it offers no log-probabilities; it is {info.state}")
    return info.logprob_kinds


async def require_idle(subject: RolloutSubject, *, patience: float = 5.0) -> None:
    """Fail unless the engine has nothing in flight soon; then it must still serve."""
    left = 0
    if subject.is_exclusive:
        end = time.monotonic() + patience
        async with client_of(subject) as client:
            # Polled: the contract has no event for "nothing in flight".
            while left := (await client.get_info()).completions_in_flight:
                if time.monotonic() > end:
                    break
                await asyncio.sleep(POLL_SECONDS)
    require(not left, f"{left} completions are in flight {patience:g} s after their call ended")
    await generate(subject, subject.groups(), SamplingParams(max_new_tokens=1))


def completions_of(result: GenerateResult) -> list[Completion]:
    """All completions; a failed one is a violation."""
    found = [c for group in result.groups for c in group.completions]
    failed = [c.failure.message for c in found if c.failure is not None]
    require(not failed, f"samples failed: {failed}")
    return found


def tokens_of(result: GenerateResult) -> list[list[int]]:
    """Tokens of all completions."""
    return [c.token_ids.tolist() for c in completions_of(result)]


def require_whole(completion: Completion, *, most: int) -> None:
    """Fail unless tokens, log-probabilities and spans fit one another."""
    count = len(completion.token_ids)
    require(completion.failure is None, f"it failed: {completion.failure}")
    require(1 <= count <= most, f"{count} tokens where 1 to {most} were asked for")
    require(len(completion.logprobs) == count, "log-probabilities are not one a token")
    finite = bool(np.isfinite(completion.logprobs).all())
    require(finite and float(completion.logprobs.max()) <= 1e-6, "a log-probability is none")
    require_spans(completion)


def require_spans(completion: Completion) -> None:
    """Fail unless every token has one version, and versions rise."""
    spans = completion.versions
    ends = [0, *(span.end for span in spans)]
    starts = [*(span.start for span in spans), len(completion.token_ids)]
    require(ends == starts, f"the spans of versions leave gaps or overlap: {spans}")
    versions = [span.policy_version for span in spans]
    require(versions == sorted(versions), f"versions fall within a completion: {versions}")
