"""Client of the rollout service."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from quartet import codec
from quartet.api.rollout.v1.rollout_service_pb2_grpc import RolloutServiceStub
from quartet.clients.base import Client, new_request_id
from quartet.types import (
    AbortWeightsRequest,
    AbortWeightsResult,
    CommitWeightsRequest,
    CommitWeightsResult,
    GenerateRequest,
    GenerateResult,
    LogprobKind,
    PauseMode,
    PrepareWeightsRequest,
    PrepareWeightsResult,
    PromptGroup,
    ReceiveEvent,
    ReceiveWeightsRequest,
    ReplicaState,
    RolloutInfo,
    SamplingParams,
    SleepRequest,
    WakeRequest,
)


class RolloutClient(Client):
    """Generates completions, and hands weights on."""

    room = "rollout"
    service = "quartet.api.rollout.v1.RolloutService"
    stub_class = RolloutServiceStub

    async def get_info(
        self, *, include_manifest: bool = False, timeout: float | None = None
    ) -> RolloutInfo:
        """What the server says of itself; with the tensors that a push must carry, when asked."""
        message = codec.encode_rollout_info_request(include_manifest)
        answer = await self._unary("GetInfo", message, timeout=timeout)
        return self._read(codec.decode_rollout_info, answer)

    async def generate(
        self,
        *,
        request_id: str,
        groups: Sequence[PromptGroup],
        sampling: SamplingParams,
        logprob_kind: LogprobKind = LogprobKind.PROCESSED,
        min_policy_version: int | None = None,
        isolated: bool = False,
        timeout: float | None = None,
    ) -> GenerateResult:
        """Complete prompts. Cancelling the call stops the engine's work on it.

        Args:
            request_id: the same when the call is repeated.
            groups: prompts and how many samples of each; at least one.
            sampling: how to sample them.
            logprob_kind: distribution of the log-probabilities to return.
            min_policy_version: oldest version that may answer; StateError otherwise.
            isolated: run these groups as a batch of their own.
            timeout: seconds; None takes the deadline of rpc.policy.

        Returns:
            One GroupCompletions for each group, in order, each with as many completions as asked.
        """
        request = GenerateRequest(
            request_id=request_id,
            groups=tuple(groups),
            sampling=sampling,
            logprob_kind=logprob_kind,
            min_policy_version=min_policy_version,
            isolated=isolated,
        )
        message = codec.encode_generate_request(request)
        answer = await self._unary("Generate", message, timeout=timeout, request_id=request_id)
        result = self._read(codec.decode_generate_result, answer)
        got = [(group.group_id, len(group.completions)) for group in result.groups]
        if got != [(group.group_id, group.num_samples) for group in groups]:
            raise self._broken("the completions are not those of the groups, in order")
        return result

    async def prepare_weights(
        self, request: PrepareWeightsRequest, *, timeout: float | None = None
    ) -> PrepareWeightsResult:
        """First phase of a push: check, and join the group."""
        message = codec.encode_prepare_weights_request(request)
        answer = await self._unary(
            "PrepareWeights", message, timeout=timeout, request_id=request.request_id
        )
        return self._read(codec.decode_prepare_weights_result, answer)

    async def receive_weights(
        self, request: ReceiveWeightsRequest, *, timeout: float | None = None
    ) -> AsyncIterator[ReceiveEvent]:
        """Second phase of a push, as events. Closing the iterator cancels the call.

        Raises:
            InfraError: the stream broke.
        """
        message = codec.encode_receive_weights_request(request)
        async for answer in self._stream_down("ReceiveWeights", message, timeout=timeout):
            yield self._read(codec.decode_receive_event, answer)

    async def commit_weights(
        self, request: CommitWeightsRequest, *, timeout: float | None = None
    ) -> CommitWeightsResult:
        """Third phase of a push: serve the received weights."""
        message = codec.encode_commit_weights_request(request)
        answer = await self._unary("CommitWeights", message, timeout=timeout)
        return self._read(codec.decode_commit_weights_result, answer)

    async def abort_weights(
        self, request: AbortWeightsRequest, *, timeout: float | None = None
    ) -> AbortWeightsResult:
        """Give a push up."""
        message = codec.encode_abort_weights_request(request)
        answer = await self._unary("AbortWeights", message, timeout=timeout)
        return self._read(codec.decode_abort_weights_result, answer)

    async def sleep(
        self, *, level: int = 1, request_id: str = "", timeout: float | None = None
    ) -> ReplicaState:
        """Free device memory: level 1 keeps the weights in host memory, 2 forgets them."""
        request = SleepRequest(request_id=request_id or new_request_id(), level=level)
        answer = await self._unary("Sleep", codec.encode_sleep_request(request), timeout=timeout)
        return self._read(codec.decode_sleep_response, answer)

    async def wake(
        self, *, tags: Sequence[str] = (), request_id: str = "", timeout: float | None = None
    ) -> ReplicaState:
        """Take device memory back: "weights", "kv_cache", or none of them for both."""
        request = WakeRequest(request_id=request_id or new_request_id(), tags=tuple(tags))
        answer = await self._unary("Wake", codec.encode_wake_request(request), timeout=timeout)
        return self._read(codec.decode_wake_response, answer)

    async def pause(
        self, mode: PauseMode, *, request_id: str = "", timeout: float | None = None
    ) -> int:
        """Hold generation; returns how many completions are held."""
        message = codec.encode_pause_request(request_id or new_request_id(), mode)
        answer = await self._unary("Pause", message, timeout=timeout)
        return self._read(codec.decode_pause_response, answer)

    async def resume(self, *, request_id: str = "", timeout: float | None = None) -> int:
        """Go on after a pause; returns how many completions go on."""
        message = codec.encode_resume_request(request_id or new_request_id())
        answer = await self._unary("Resume", message, timeout=timeout)
        return self._read(codec.decode_resume_response, answer)
