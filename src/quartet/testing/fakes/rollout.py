"""A rollout service that samples from a hash, and takes weight pushes that carry a number."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
from numpy.typing import NDArray

from quartet import codec
from quartet.api.rollout.v1 import rollout_service_pb2 as pb
from quartet.api.rollout.v1 import rollout_service_pb2_grpc as pb_grpc
from quartet.errors import InfraError, RequestError, StateError
from quartet.rpc.idempotency import IdempotencyCache, RequestDigest
from quartet.testing.fakes import model
from quartet.testing.fakes.gate import Gate
from quartet.testing.fakes.script import Script
from quartet.types import (
    AbortWeightsResult,
    CommitWeightsResult,
    Completion,
    Failure,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    GroupCompletions,
    LogprobKind,
    LogprobSpec,
    PrepareWeightsResult,
    PromptGroup,
    PushBackend,
    ReceiveEvent,
    ReplicaState,
    RolloutInfo,
    SamplingParams,
    SequenceBatch,
    ServerInfo,
    VersionSpan,
    WeightManifest,
)
from quartet.weights import WeightInbox

if TYPE_CHECKING:
    import torch


VOCABULARY_LIMIT = 1 << 24
"""Tokens from here on are refused: prompts may come from any tokenizer."""


class FakeRollout(pb_grpc.RolloutServiceServicer):
    """Completes prompts, the same for the same prompt and seed.

    A push without a meeting place carries no bytes: the digest of CommitWeights is the number of
    optimizer steps behind the weights, as a decimal (FakeLearner pushes so). A push with one is
    taken like any other; its tensors count for as many steps as they add up to.

    Args:
        info: what GetInfo says.
        manifest: the tensors that a push must carry.
        seconds_per_token: how long a token takes; 0 makes completions at once.
    """

    name = "rollout"

    def __init__(
        self,
        info: ServerInfo | None = None,
        manifest: WeightManifest | None = None,
        *,
        seconds_per_token: float = 0.0,
    ) -> None:
        self.script = Script()
        self.server_info = info or ServerInfo(
            service="rollout", replica="rollout-fake", capabilities=("sleep",)
        )
        self.replica = self.server_info.replica
        self.manifest = manifest or WeightManifest(tensors=())
        self.state = ReplicaState.SERVING
        self.policy_version = 0
        self.weights: float = 0
        """Optimizer steps behind the weights that serve."""
        self.in_flight = 0
        """Completions being worked on."""
        self.seconds_per_token = seconds_per_token
        self._epoch = 0
        self._inbox = WeightInbox(wanted=lambda: self.manifest, replica=self.replica)
        self._gate = Gate()
        self._asleep: set[str] = set()
        self._has_forgotten = False
        self._failures: dict[str, Failure] = {}
        self._held: dict[str, asyncio.Event] = {}
        self._answers: IdempotencyCache[pb.GenerateResponse] = IdempotencyCache()
        self._prepared: IdempotencyCache[pb.PrepareWeightsResponse] = IdempotencyCache()

    def fail_sample(self, sample_id: str, failure: Failure) -> None:
        """Answer `failure` in the place of this sample."""
        self._failures[sample_id] = failure

    def hold_group(self, group_id: str) -> asyncio.Event:
        """Make calls that carry this group wait until the returned event is set."""
        return self._held.setdefault(group_id, asyncio.Event())

    def register(self, server: grpc.aio.Server) -> str:
        """Add the servicer."""
        pb_grpc.add_RolloutServiceServicer_to_server(self, server)
        return pb.DESCRIPTOR.services_by_name["RolloutService"].full_name

    async def start(self) -> None:
        """Nothing to load."""

    async def stop(self) -> None:
        """Nothing to let go."""

    async def GetInfo(self, request: pb.GetInfoRequest, context: Any) -> pb.GetInfoResponse:
        """Say state and version."""
        await self.script.enter("GetInfo", None)
        wanted = codec.decode_rollout_info_request(request)
        return codec.encode_rollout_info(
            RolloutInfo(
                info=self.server_info,
                engine="fake",
                state=self.state,
                policy_version=self.policy_version,
                logprob_kinds=(LogprobKind.RAW, LogprobKind.PROCESSED),
                push_backends=tuple(PushBackend),
                manifest=self.manifest if wanted else None,
                completions_in_flight=self.in_flight,
            )
        )

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> pb.GenerateResponse:
        """Complete every group."""
        asked = codec.decode_generate_request(request)
        await self.script.enter("Generate", asked)
        self._check_state(asked)
        return await self._answers.run(
            asked.request_id, RequestDigest(request), lambda: self._generate(asked)
        )

    def _check_state(self, asked: GenerateRequest) -> None:
        if self.state is not ReplicaState.SERVING:
            raise StateError(f"this replica is {self.state}", reason="NOT_SERVING")
        oldest = asked.min_policy_version
        if oldest is not None and self.policy_version < oldest:
            raise StateError(
                f"version {self.policy_version} serves, {oldest} is wanted",
                reason="VERSION_TOO_OLD",
                field="min_policy_version",
                value=str(oldest),
            )

    async def _generate(self, asked: GenerateRequest) -> pb.GenerateResponse:
        for group in asked.groups:
            self._check_prompt(group)
        await self._gate.opened()
        count = sum(group.num_samples for group in asked.groups)
        self._count(count)
        try:
            for group in asked.groups:
                if group.group_id in self._held:
                    await self._held[group.group_id].wait()
            sampling = asked.sampling
            spec = LogprobSpec(
                kind=asked.logprob_kind,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
            )
            groups = await asyncio.gather(
                *(self._complete(g, sampling, spec) for g in asked.groups)
            )
        finally:
            self._count(-count)
        return codec.encode_generate_result(
            GenerateResult(groups=tuple(groups), logprob_spec=spec, replica=self.replica)
        )

    def _count(self, change: int) -> None:
        self.in_flight += change
        self._gate.is_empty(self.in_flight == 0)

    def _check_prompt(self, group: PromptGroup) -> None:
        length, most = len(group.prompt_token_ids), self.server_info.max_sequence_length
        if most and length >= most:
            raise RequestError(
                f"{length} tokens, and prompt and completion together may have {most}",
                reason="PROMPT_TOO_LONG",
                field="groups.prompt_token_ids",
                value=str(length),
            )
        if (largest := max(group.prompt_token_ids)) >= VOCABULARY_LIMIT:
            raise RequestError(
                f"there is no token {largest}",
                reason="TOKEN_UNKNOWN",
                field="groups.prompt_token_ids",
                value=str(largest),
            )

    async def _complete(
        self, group: PromptGroup, sampling: SamplingParams, spec: LogprobSpec
    ) -> GroupCompletions:
        seeds = group.seeds or tuple(range(group.num_samples))
        names = group.sample_ids or ("",) * group.num_samples
        room = self.server_info.max_sequence_length - len(group.prompt_token_ids)
        if self.server_info.max_sequence_length:
            limit = min(sampling.max_new_tokens or model.DEFAULT_LENGTH, room)
            sampling = replace(sampling, max_new_tokens=limit)
        completions = await asyncio.gather(
            *(
                self._sample(group.prompt_token_ids, seed, name, sampling, spec)
                for seed, name in zip(seeds, names, strict=True)
            )
        )
        return GroupCompletions(group_id=group.group_id, completions=tuple(completions))

    async def _sample(
        self,
        prompt: tuple[int, ...],
        seed: int,
        sample_id: str,
        sampling: SamplingParams,
        spec: LogprobSpec,
    ) -> Completion:
        if sample_id in self._failures:
            return Completion(sample_id=sample_id, failure=self._failures[sample_id])
        greedy = sampling.temperature == 0
        tokens = model.sample(prompt, 0 if greedy else seed, sampling)
        whole = SequenceBatch.of([[*prompt, *tokens.tolist()]])
        temperature = 1.0 if spec.kind is LogprobKind.RAW else spec.temperature or 1.0
        logprobs = np.empty(len(tokens), np.float32)
        versions: list[VersionSpan] = []
        is_cut = False
        for place in range(len(tokens)):
            if not await self._gate.passed(self.seconds_per_token, has_begun=place > 0):
                is_cut = True
                tokens, logprobs = tokens[:place], logprobs[:place]
                break
            flat = model.logprobs(whole, self.weights, temperature)[len(prompt) :]
            logprobs[place] = flat[place]
            start = place
            if versions and versions[-1].policy_version == self.policy_version:
                start = versions.pop().start
            versions.append(
                VersionSpan(policy_version=self.policy_version, start=start, end=place + 1)
            )
        return Completion(
            sample_id=sample_id,
            token_ids=tokens,
            logprobs=logprobs,
            finish_reason=_finish_reason(tokens, sampling, is_cut=is_cut),
            versions=tuple(versions),
        )

    async def PrepareWeights(
        self, request: pb.PrepareWeightsRequest, context: Any
    ) -> pb.PrepareWeightsResponse:
        """Note the epoch."""
        asked = codec.decode_prepare_weights_request(request)
        await self.script.enter("PrepareWeights", asked)

        async def prepare() -> pb.PrepareWeightsResponse:
            if asked.epoch <= self._epoch:
                raise StateError(f"epoch {asked.epoch} is over", reason="EPOCH_LOST")
            if asked.rendezvous.store_address or asked.rendezvous.folder:
                await self._inbox.prepare(asked)
            self._epoch = asked.epoch
            return codec.encode_prepare_weights_result(PrepareWeightsResult(replica=self.replica))

        return await self._prepared.run(
            f"{asked.epoch}/{asked.request_id}", RequestDigest(request), prepare
        )

    async def ReceiveWeights(
        self, request: pb.ReceiveWeightsRequest, context: Any
    ) -> AsyncIterator[pb.ReceiveWeightsResponse]:
        """Say READY and DONE."""
        asked = codec.decode_receive_weights_request(request)
        await self.script.enter("ReceiveWeights", asked)
        if self._inbox.busy:
            async for event in self._inbox.receive(asked):
                yield codec.encode_receive_event(event)
            return
        yield codec.encode_receive_event(ReceiveEvent(event="ready"))
        yield codec.encode_receive_event(ReceiveEvent(event="done"))

    async def CommitWeights(
        self, request: pb.CommitWeightsRequest, context: Any
    ) -> pb.CommitWeightsResponse:
        """Serve the new version."""
        asked = codec.decode_commit_weights_request(request)
        await self.script.enter("CommitWeights", asked)
        if asked.epoch != self._epoch:
            raise InfraError(f"epoch {asked.epoch} is not under way", reason="EPOCH_LOST")
        if self._inbox.busy:
            await self._inbox.commit(asked, self._load)
        else:
            self._serve(asked.policy_version, int(asked.digest))
        return codec.encode_commit_weights_result(
            CommitWeightsResult(policy_version=self.policy_version)
        )

    async def AbortWeights(
        self, request: pb.AbortWeightsRequest, context: Any
    ) -> pb.AbortWeightsResponse:
        """Keep the old version."""
        asked = codec.decode_abort_weights_request(request)
        await self.script.enter("AbortWeights", asked)
        self._inbox.abort(asked)
        return codec.encode_abort_weights_result(
            AbortWeightsResult(policy_version=self.policy_version, state=self.state)
        )

    async def _load(self, tensors: Iterable[tuple[str, torch.Tensor]], policy_version: int) -> int:
        self._serve(policy_version, sum(float(tensor.sum()) for _, tensor in tensors))
        return self.in_flight

    def _serve(self, policy_version: int, weights: float) -> None:
        self.policy_version, self.weights, self._has_forgotten = policy_version, weights, False
        self._settle()

    def _settle(self) -> None:
        """Take the state that sleep and pushes leave, unless a test has set another."""
        if self._asleep:
            self.state = ReplicaState.ASLEEP
        elif self._has_forgotten:
            self.state = ReplicaState.STALE
        elif self.state in (ReplicaState.ASLEEP, ReplicaState.STALE):
            self.state = ReplicaState.SERVING

    async def Sleep(self, request: pb.SleepRequest, context: Any) -> pb.SleepResponse:
        """Refuse Generate from now on, when what runs is done."""
        asked = codec.decode_sleep_request(request)
        await self.script.enter("Sleep", asked)
        self._asleep = {"weights", "kv_cache"}
        self._has_forgotten = self._has_forgotten or asked.level >= 2
        self._settle()
        await self._gate.emptied()
        return codec.encode_sleep_response(self.state)

    async def Wake(self, request: pb.WakeRequest, context: Any) -> pb.WakeResponse:
        """Answer Generate again, when all is awake and the weights are known."""
        asked = codec.decode_wake_request(request)
        await self.script.enter("Wake", asked)
        self._asleep -= set(asked.tags or self._asleep)
        self._settle()
        return codec.encode_wake_response(self.state)

    async def Pause(self, request: pb.PauseRequest, context: Any) -> pb.PauseResponse:
        """Hold what comes until Resume, and what runs between two tokens."""
        request_id, mode = codec.decode_pause_request(request)
        await self.script.enter("Pause", (request_id, mode))
        await self._gate.close(mode)
        return codec.encode_pause_response(self.in_flight)

    async def Resume(self, request: pb.ResumeRequest, context: Any) -> pb.ResumeResponse:
        """Go on."""
        await self.script.enter("Resume", codec.decode_request_id(request))
        self._gate.open()
        return codec.encode_resume_response(self.in_flight)


def _finish_reason(
    tokens: NDArray[np.int32], sampling: SamplingParams, *, is_cut: bool
) -> FinishReason:
    if is_cut:
        return FinishReason.ABORTED
    stops = (*sampling.stop_token_ids, *(() if sampling.ignore_eos else (model.EOS,)))
    return FinishReason.STOP if tokens[-1] in stops else FinishReason.LENGTH
