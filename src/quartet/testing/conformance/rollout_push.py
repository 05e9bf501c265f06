"""Pushes that the rollout suite makes itself, and takes back.

    async with writing(subject) as writer:
        version = await writer.push(writer.model.changed(1))
        await writer.require_serves(writer.model.changed(1), version)

After the block the server has the weights that it was found with, under a higher version.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from quartet.clients.rollout import RolloutClient
from quartet.errors import InfraError, QuartetError
from quartet.testing.conformance import Skipped, Violation, require
from quartet.testing.conformance import rollout_calls as calls
from quartet.testing.conformance.rollout_calls import RolloutSubject
from quartet.testing.conformance.rollout_model import (
    ServedModel,
    Weights,
    model_of,
    require_greedy,
    require_logprobs,
)
from quartet.types import (
    AbortWeightsRequest,
    AbortWeightsResult,
    CommitWeightsRequest,
    CommitWeightsResult,
    GenerateResult,
    PrepareWeightsRequest,
    PrepareWeightsResult,
    PromptGroup,
    PushBackend,
    ReceiveEvent,
    ReceiveWeightsRequest,
    ReplicaPushResult,
    ReplicaState,
    RolloutInfo,
    SamplingParams,
)
from quartet.weights import pack_bucket, plan_buckets, push_weights

if TYPE_CHECKING:
    import torch

GROUP_SECONDS = 30.0
"""Longest wait for one step of a push."""

Answers = list[tuple[list[int], NDArray[np.float32]]]
"""Tokens and log-probabilities of some completions."""

_PROBE = SamplingParams(max_new_tokens=8, min_new_tokens=0)


class GivenUp(Exception):
    """The suite ends a push of its own on purpose."""


@dataclass(kw_only=True, slots=True)
class Tampered:
    """A replica, with what happens to the calls on their way to it."""

    client: RolloutClient
    leaves_before_receive: bool = False
    """Nobody asks it to receive: the push is aborted after the prepare."""
    spoils_digest: bool = False
    """The commit names another digest than that of the bytes."""
    aborts: list[AbortWeightsResult] = field(default_factory=list)
    """Its answers to AbortWeights."""

    @property
    def address(self) -> str:
        """Where it listens."""
        return self.client.address

    async def get_info(self, *, timeout: float | None = None) -> RolloutInfo:
        """What it is."""
        return await self.client.get_info(timeout=timeout)

    async def prepare_weights(
        self, request: PrepareWeightsRequest, *, timeout: float | None = None
    ) -> PrepareWeightsResult:
        """First phase."""
        return await self.client.prepare_weights(request, timeout=timeout)

    async def receive_weights(
        self, request: ReceiveWeightsRequest, *, timeout: float | None = None
    ) -> AsyncIterator[ReceiveEvent]:
        """Second phase."""
        if self.leaves_before_receive:
            raise InfraError("the sender gave the push up")
        async for event in self.client.receive_weights(request, timeout=timeout):
            yield event

    async def commit_weights(
        self, request: CommitWeightsRequest, *, timeout: float | None = None
    ) -> CommitWeightsResult:
        """Third phase."""
        if self.spoils_digest:
            request = replace(request, digest="0" * len(request.digest))
        return await self.client.commit_weights(request, timeout=timeout)

    async def abort_weights(
        self, request: AbortWeightsRequest, *, timeout: float | None = None
    ) -> AbortWeightsResult:
        """Give up."""
        answer = await self.client.abort_weights(request, timeout=timeout)
        self.aborts.append(answer)
        return answer


class Writer:
    """Pushes to one server. Made by `writing`."""

    def __init__(
        self, subject: RolloutSubject, client: RolloutClient, model: ServedModel, info: RolloutInfo
    ) -> None:
        self.subject = subject
        self.client = client
        self.model = model
        self.backend = _backend(subject, info)
        self.version = info.policy_version
        """The last that was committed."""
        self._found = info.policy_version
        self._baseline: Answers = []

    async def begin(self) -> None:
        """Note what it serves now; raises Skipped when that are not the weights of its model."""
        self._baseline = await self.ask()
        try:
            await self._require_original("its numbers are not the model's")
        except Violation as error:
            raise Skipped(f"it could not be given its own weights back: {error}") from error

    async def push(self, weights: Weights) -> int:
        """Bring weights to the server; returns their version."""
        version = self.version + 1
        result = await self.attempt(weights, Tampered(client=self.client))
        require(
            result.committed,
            f"a push by {self.backend} failed in {result.failed_phase}: {result.error}",
        )
        self.version = version
        return version

    async def attempt(
        self, weights: Weights, target: Tampered, *, buckets: int | None = None
    ) -> ReplicaPushResult:
        """Try to push the next version; says what became of it.

        Args:
            weights: What to push.
            target: The server, or what is made of it.
            buckets: Buckets after which the sender gives up; None sends all.

        Raises:
            GivenUp: After so many buckets.
        """
        plan = plan_buckets(self.model.manifest)

        def source() -> Iterator[tuple[int, torch.Tensor]]:
            for bucket in plan:
                if bucket.index == buckets:
                    raise GivenUp
                yield bucket.index, pack_bucket(bucket, weights)

        given = self.subject.push_folder
        folder = given or tempfile.mkdtemp(prefix="quartet-conformance-")
        try:
            result = await push_weights(
                manifest=self.model.manifest,
                tensors=source,
                replicas=[target],
                epoch=time.time_ns(),
                policy_version=self.version + 1,
                backend=self.backend,
                group_timeout=GROUP_SECONDS,
                folder=folder,
            )
        finally:
            if not given:
                shutil.rmtree(folder, ignore_errors=True)
        return result.replicas[0]

    async def ask(self) -> Answers:
        """What the server says now, to the same question each time."""
        result = await calls.generate(self.subject, self.subject.groups(samples=2), _PROBE)
        found = calls.completions_of(result)
        return [(c.token_ids.tolist(), c.logprobs) for c in found]

    def differs(self, now: Answers) -> bool:
        """Whether these answers are others than those at the start, by more than rounding."""
        return any(
            tokens != before or float(np.abs(logprobs - old).max()) > self.subject.logprob_tolerance
            for (tokens, logprobs), (before, old) in zip(now, self._baseline, strict=True)
        )

    async def require_serves(self, weights: Weights, version: int) -> None:
        """Fail unless it serves this version, and its numbers are those of these weights."""
        info = await self.client.get_info()
        require(info.state is ReplicaState.SERVING, f"its state is {info.state}, not serving")
        require(
            info.policy_version == version,
            f"GetInfo says version {info.policy_version} where {version} was committed last",
        )
        groups = self.subject.groups(samples=2)
        result = await calls.generate(self.subject, groups, _PROBE, min_policy_version=version)
        self.require_made_by(result, groups, {version: weights})
        if self.model.module is not None:
            await self._require_greedy(weights)
        elif weights is self.model.weights:
            require(not self.differs(await self.ask()), "its numbers are not those of old")
        else:
            require(self.differs(await self.ask()), "its numbers are still those of old")

    def require_made_by(
        self,
        result: GenerateResult,
        groups: Sequence[PromptGroup],
        weights_of: Mapping[int, Weights],
    ) -> None:
        """Fail unless every token is of one of these versions, and has its log-probability."""
        for made, asked in zip(result.groups, groups, strict=True):
            for completion in made.completions:
                require(completion.failure is None, f"it failed: {completion.failure}")
                calls.require_spans(completion)
                if self.model.module is None:
                    named = {span.policy_version for span in completion.versions}
                    require(named <= weights_of.keys(), f"tokens are of versions {sorted(named)}")
                    continue
                require_logprobs(
                    self.model,
                    weights_of,
                    asked.prompt_token_ids,
                    completion,
                    tolerance=self.subject.logprob_tolerance,
                )

    async def require_unchanged(self, what: str) -> None:
        """Fail unless it serves what it served at the start of the check."""
        info = await self.client.get_info()
        require(info.state is ReplicaState.SERVING, f"after {what} its state is {info.state}")
        require(
            info.policy_version == self.version,
            f"after {what} it says version {info.policy_version}, not {self.version}",
        )
        await self._require_original(f"after {what} its log-probabilities are others than before")

    async def put_back(self) -> None:
        """Let the server serve the weights that it was found with, awake."""
        if (await self.client.get_info()).state is ReplicaState.ASLEEP:
            await self.client.wake()
        info = await self.client.get_info()
        if info.policy_version != self._found or info.state is not ReplicaState.SERVING:
            self.version = max(self.version, info.policy_version)
            await self.push(self.model.weights)

    async def _require_greedy(self, weights: Weights) -> None:
        groups = self.subject.groups()
        sampling = SamplingParams(temperature=0.0, max_new_tokens=8, ignore_eos=True)
        result = await calls.generate(self.subject, groups, sampling)
        for asked, completion in zip(groups, calls.completions_of(result), strict=True):
            tokens = completion.token_ids.tolist()
            logits = self.model.logits(weights, asked.prompt_token_ids, tokens)
            require_greedy(logits, tokens, tolerance=self.subject.logprob_tolerance)

    async def _require_original(self, message: str) -> None:
        try:
            await self.require_serves(self.model.weights, self.version)
        except Violation as error:
            raise Violation(f"{message}: {error}") from error


@asynccontextmanager
async def writing(subject: RolloutSubject) -> AsyncIterator[Writer]:
    """Pushes to a server that nobody else uses; afterwards it has the weights it had.

    Raises:
        Skipped: It is shared, or its weights are not known and could not be put back.
        Violation: A check in the block failed, or the weights could not be put back.
    """
    calls.require_exclusive(subject)
    async with calls.client_of(subject) as client:
        info = await client.get_info(include_manifest=True)
        require(info.manifest is not None, "the manifest is missing")
        assert info.manifest is not None
        writer = Writer(subject, client, model_of(subject, info.manifest), info)
        await writer.begin()
        try:
            yield writer
        except BaseException as error:
            try:
                await writer.put_back()
            except (QuartetError, Violation) as left:
                raise Violation(f"{error}; and its weights could not be put back: {left}") from left
            raise
        await writer.put_back()


def _backend(subject: RolloutSubject, info: RolloutInfo) -> PushBackend:
    wanted = (
        [subject.push_backend] if subject.push_backend else [PushBackend.GLOO, PushBackend.FILE]
    )
    for backend in wanted:
        if backend in info.push_backends:
            return backend
    offered = ", ".join(info.push_backends) or "nothing"
    raise Skipped(f"the suite pushes by {', '.join(wanted)}, and it takes {offered}")
