"""gRPC door of the rollout room: decode, call, encode."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc

from quartet import codec
from quartet.api.rollout.v1 import rollout_service_pb2 as pb
from quartet.api.rollout.v1 import rollout_service_pb2_grpc as pb_grpc
from quartet.rpc.idempotency import IdempotencyCache, RequestDigest
from quartet_rollout.room import RolloutRoom


class RolloutServicer(pb_grpc.RolloutServiceServicer):
    """Answers RolloutService. Exceptions become status in the server's interceptor."""

    def __init__(self, room: RolloutRoom) -> None:
        """Serve one room."""
        self._room = room
        self._completions = IdempotencyCache[pb.GenerateResponse]()
        # A repeat joins the wait for the group: to leave it would end the push for all members.
        self._prepared = IdempotencyCache[pb.PrepareWeightsResponse](stop_with_callers=False)
        # A late repeat of a Sleep must not put a replica that has been woken back to sleep.
        self._sleeps = IdempotencyCache[pb.SleepResponse](stop_with_callers=False)
        self._wakes = IdempotencyCache[pb.WakeResponse](stop_with_callers=False)
        self._pauses = IdempotencyCache[pb.PauseResponse](stop_with_callers=False)
        self._resumes = IdempotencyCache[pb.ResumeResponse](stop_with_callers=False)

    async def GetInfo(
        self, request: pb.GetInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetInfoResponse:
        """Say what this server is."""
        include_manifest = codec.decode_rollout_info_request(request)
        return codec.encode_rollout_info(self._room.info(include_manifest=include_manifest))

    async def Generate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> pb.GenerateResponse:
        """Complete prompts, once a request_id."""
        call = codec.decode_generate_request(request)

        async def generate() -> pb.GenerateResponse:
            return codec.encode_generate_result(await self._room.generate(call))

        return await self._completions.run(call.request_id, RequestDigest(request), generate)

    async def PrepareWeights(
        self, request: pb.PrepareWeightsRequest, context: grpc.aio.ServicerContext
    ) -> pb.PrepareWeightsResponse:
        """First phase of a push, once an epoch and request_id."""
        call = codec.decode_prepare_weights_request(request)

        async def prepare() -> pb.PrepareWeightsResponse:
            return codec.encode_prepare_weights_result(await self._room.prepare(call))

        # All attempts of a push may share their request_id.
        return await self._prepared.run(
            f"{call.epoch}/{call.request_id}", RequestDigest(request), prepare
        )

    async def ReceiveWeights(
        self, request: pb.ReceiveWeightsRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.ReceiveWeightsResponse]:
        """Second phase of a push."""
        async for event in self._room.receive(codec.decode_receive_weights_request(request)):
            yield codec.encode_receive_event(event)

    async def CommitWeights(
        self, request: pb.CommitWeightsRequest, context: grpc.aio.ServicerContext
    ) -> pb.CommitWeightsResponse:
        """Third phase of a push."""
        call = codec.decode_commit_weights_request(request)
        return codec.encode_commit_weights_result(await self._room.commit(call))

    async def AbortWeights(
        self, request: pb.AbortWeightsRequest, context: grpc.aio.ServicerContext
    ) -> pb.AbortWeightsResponse:
        """Give a push up."""
        return codec.encode_abort_weights_result(
            self._room.abort(codec.decode_abort_weights_request(request))
        )

    async def Sleep(
        self, request: pb.SleepRequest, context: grpc.aio.ServicerContext
    ) -> pb.SleepResponse:
        """Free device memory."""
        call = codec.decode_sleep_request(request)

        async def sleep() -> pb.SleepResponse:
            return codec.encode_sleep_response(await self._room.sleep(call.level))

        return await self._sleeps.run(call.request_id, RequestDigest(request), sleep)

    async def Wake(
        self, request: pb.WakeRequest, context: grpc.aio.ServicerContext
    ) -> pb.WakeResponse:
        """Take it back."""
        call = codec.decode_wake_request(request)

        async def wake() -> pb.WakeResponse:
            return codec.encode_wake_response(await self._room.wake(call))

        return await self._wakes.run(call.request_id, RequestDigest(request), wake)

    async def Pause(
        self, request: pb.PauseRequest, context: grpc.aio.ServicerContext
    ) -> pb.PauseResponse:
        """Hold generation."""
        request_id, mode = codec.decode_pause_request(request)

        async def pause() -> pb.PauseResponse:
            return codec.encode_pause_response(await self._room.pause(mode))

        return await self._pauses.run(request_id, RequestDigest(request), pause)

    async def Resume(
        self, request: pb.ResumeRequest, context: grpc.aio.ServicerContext
    ) -> pb.ResumeResponse:
        """Go on."""
        request_id = codec.decode_request_id(request)

        async def resume() -> pb.ResumeResponse:
            return codec.encode_resume_response(await self._room.resume())

        return await self._resumes.run(request_id, RequestDigest(request), resume)
