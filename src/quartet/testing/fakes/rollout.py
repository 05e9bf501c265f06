"""A rollout service that samples from a hash, and takes weight pushes that carry a number."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import numpy as np

from quartet import codec
from quartet.api.rollout.v1 import rollout_service_pb2 as pb
from quartet.api.rollout.v1 import rollout_service_pb2_grpc as pb_grpc
from quartet.errors import InfraError, StateError
from quartet.rpc.idempotency import IdempotencyCache, RequestDigest
from quartet.testing.fakes import model
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


class FakeRollout(pb_grpc.RolloutServiceServicer):
    """Completes prompts, the same for the same prompt and seed.

    A push to it carries no bytes: the digest of CommitWeights is the number of optimizer steps
    behind the weights, as a decimal (FakeLearner pushes so).

    Args:
        info: what GetInfo says.
        manifest: the tensors that a push must carry.
    """

    name = "rollout"

    def __init__(
        self, info: ServerInfo | None = None, manifest: WeightManifest | None = None
    ) -> None:
        self.script = Script()
        self.server_info = info or ServerInfo(service="rollout", replica="rollout-fake")
        self.replica = self.server_info.replica
        self.manifest = manifest or WeightManifest(tensors=())
        self.state = ReplicaState.SERVING
        self.policy_version = 0
        self.weights = 0
        """Optimizer steps behind the weights that serve."""
        self.in_flight = 0
        """Calls of Generate being worked on."""
        self._epoch = 0
        self._running = asyncio.Event()
        self._running.set()
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
        self.in_flight += 1
        try:
            await self._running.wait()
            for group in asked.groups:
                if group.group_id in self._held:
                    await self._held[group.group_id].wait()
        finally:
            self.in_flight -= 1
        sampling = asked.sampling
        spec = LogprobSpec(
            kind=asked.logprob_kind,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
        )
        result = GenerateResult(
            groups=tuple(self._complete(group, sampling, spec) for group in asked.groups),
            logprob_spec=spec,
            replica=self.replica,
        )
        return codec.encode_generate_result(result)

    def _complete(
        self, group: PromptGroup, sampling: SamplingParams, spec: LogprobSpec
    ) -> GroupCompletions:
        seeds = group.seeds or tuple(range(group.num_samples))
        names = group.sample_ids or ("",) * group.num_samples
        completions = tuple(
            self._sample(group.prompt_token_ids, seed, name, sampling, spec)
            for seed, name in zip(seeds, names, strict=True)
        )
        return GroupCompletions(group_id=group.group_id, completions=completions)

    def _sample(
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
        flat = model.logprobs(whole, self.weights, temperature)[len(prompt) :]
        stops = (*sampling.stop_token_ids, *(() if sampling.ignore_eos else (model.EOS,)))
        stopped = tokens[-1] in stops
        return Completion(
            sample_id=sample_id,
            token_ids=tokens,
            logprobs=np.ascontiguousarray(flat),
            finish_reason=FinishReason.STOP if stopped else FinishReason.LENGTH,
            versions=(VersionSpan(policy_version=self.policy_version, start=0, end=len(tokens)),),
        )

    async def PrepareWeights(
        self, request: pb.PrepareWeightsRequest, context: Any
    ) -> pb.PrepareWeightsResponse:
        """Note the epoch."""
        asked = codec.decode_prepare_weights_request(request)
        await self.script.enter("PrepareWeights", asked)

        async def prepare() -> pb.PrepareWeightsResponse:
            if asked.epoch <= self._epoch:
                raise InfraError(f"epoch {asked.epoch} is over", reason="EPOCH_LOST")
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
        self.policy_version, self.weights = asked.policy_version, int(asked.digest)
        return codec.encode_commit_weights_result(
            CommitWeightsResult(policy_version=self.policy_version)
        )

    async def AbortWeights(
        self, request: pb.AbortWeightsRequest, context: Any
    ) -> pb.AbortWeightsResponse:
        """Keep the old version."""
        asked = codec.decode_abort_weights_request(request)
        await self.script.enter("AbortWeights", asked)
        return codec.encode_abort_weights_result(
            AbortWeightsResult(policy_version=self.policy_version, state=self.state)
        )

    async def Sleep(self, request: pb.SleepRequest, context: Any) -> pb.SleepResponse:
        """Refuse Generate from now on."""
        await self.script.enter("Sleep", codec.decode_sleep_request(request))
        self.state = ReplicaState.ASLEEP
        return codec.encode_sleep_response(self.state)

    async def Wake(self, request: pb.WakeRequest, context: Any) -> pb.WakeResponse:
        """Answer Generate again."""
        await self.script.enter("Wake", codec.decode_wake_request(request))
        self.state = ReplicaState.SERVING
        return codec.encode_wake_response(self.state)

    async def Pause(self, request: pb.PauseRequest, context: Any) -> pb.PauseResponse:
        """Hold what comes until Resume; nothing runs long enough to be held in its middle."""
        await self.script.enter("Pause", codec.decode_pause_request(request))
        self._running.clear()
        return codec.encode_pause_response(self.in_flight)

    async def Resume(self, request: pb.ResumeRequest, context: Any) -> pb.ResumeResponse:
        """Go on."""
        await self.script.enter("Resume", codec.decode_request_id(request))
        self._running.set()
        return codec.encode_resume_response(self.in_flight)
