"""gRPC door of the learner: decode, call, encode."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc

from quartet import codec
from quartet.api.learner.v1 import learner_service_pb2 as pb
from quartet.api.learner.v1 import learner_service_pb2_grpc as pb_grpc
from quartet.errors import RequestError
from quartet.rpc.idempotency import IdempotencyCache, RequestDigest
from quartet.types import ForwardRequest, TrainSamples, TrainStep
from quartet_learner.room import LearnerRoom


class LearnerServicer(pb_grpc.LearnerServiceServicer):
    """Answers LearnerService. Exceptions become status in the server's interceptor.

    Everything that changes the learner is done to its end once it has begun, also when its caller
    goes away, and a repeat of its request_id gets the same answer.
    """

    def __init__(self, room: LearnerRoom) -> None:
        """Serve one room."""
        self._room = room
        self._started = IdempotencyCache[pb.StartRunResponse](stop_with_callers=False)
        self._trained = IdempotencyCache[pb.TrainResponse](stop_with_callers=False)
        self._saved = IdempotencyCache[pb.SaveCheckpointResponse](stop_with_callers=False)
        self._loaded = IdempotencyCache[pb.LoadCheckpointResponse](stop_with_callers=False)
        self._exported = IdempotencyCache[pb.ExportModelResponse](stop_with_callers=False)
        self._pushed = IdempotencyCache[pb.PushWeightsResponse](stop_with_callers=False)

    async def GetInfo(
        self, request: pb.GetInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetInfoResponse:
        """Say what this server is and where its run stands."""
        return codec.encode_learner_info(self._room.info())

    async def StartRun(
        self, request: pb.StartRunRequest, context: grpc.aio.ServicerContext
    ) -> pb.StartRunResponse:
        """Begin a run."""
        call = codec.decode_start_run_request(request)

        async def start() -> pb.StartRunResponse:
            return codec.encode_start_run_result(await self._room.start_run(call))

        return await self._started.run(call.request_id, RequestDigest(request), start)

    async def Forward(
        self, request_iterator: AsyncIterator[pb.ForwardRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.ForwardResponse]:
        """Evaluate chunk after chunk."""

        async def decoded() -> AsyncIterator[ForwardRequest]:
            async for message in request_iterator:
                yield codec.decode_forward_request(message)

        async for result in self._room.forward(decoded()):
            yield codec.encode_forward_result(result)

    async def Train(
        self, request_iterator: AsyncIterator[pb.TrainRequest], context: grpc.aio.ServicerContext
    ) -> pb.TrainResponse:
        """One optimizer step, once a request_id."""
        step, parts, digest = await _read_step(request_iterator)

        async def train() -> pb.TrainResponse:
            return codec.encode_train_result(await self._room.train(step, parts))

        return await self._trained.run(step.request_id, digest, train)

    async def SaveCheckpoint(
        self, request: pb.SaveCheckpointRequest, context: grpc.aio.ServicerContext
    ) -> pb.SaveCheckpointResponse:
        """Write a checkpoint."""
        call = codec.decode_save_checkpoint_request(request)

        async def save() -> pb.SaveCheckpointResponse:
            return codec.encode_save_checkpoint_result(await self._room.save_checkpoint(call))

        return await self._saved.run(call.request_id, RequestDigest(request), save)

    async def LoadCheckpoint(
        self, request: pb.LoadCheckpointRequest, context: grpc.aio.ServicerContext
    ) -> pb.LoadCheckpointResponse:
        """Go on from a checkpoint."""
        call = codec.decode_load_checkpoint_request(request)

        async def load() -> pb.LoadCheckpointResponse:
            return codec.encode_load_checkpoint_result(await self._room.load_checkpoint(call))

        return await self._loaded.run(call.request_id, RequestDigest(request), load)

    async def ExportModel(
        self, request: pb.ExportModelRequest, context: grpc.aio.ServicerContext
    ) -> pb.ExportModelResponse:
        """Write the model for others."""
        call = codec.decode_export_model_request(request)

        async def export() -> pb.ExportModelResponse:
            return codec.encode_export_model_result(await self._room.export_model(call))

        return await self._exported.run(call.request_id, RequestDigest(request), export)

    async def PushWeights(
        self, request: pb.PushWeightsRequest, context: grpc.aio.ServicerContext
    ) -> pb.PushWeightsResponse:
        """Bring the weights to rollout replicas."""
        call = codec.decode_push_weights_request(request)

        async def push() -> pb.PushWeightsResponse:
            return codec.encode_push_result(await self._room.push_weights(call))

        return await self._pushed.run(call.request_id, RequestDigest(request), push)

    async def Sleep(
        self, request: pb.SleepRequest, context: grpc.aio.ServicerContext
    ) -> pb.SleepResponse:
        """Free the device."""
        codec.decode_request_id(request)
        await self._room.sleep()
        return pb.SleepResponse()

    async def Wake(
        self, request: pb.WakeRequest, context: grpc.aio.ServicerContext
    ) -> pb.WakeResponse:
        """Take it back."""
        codec.decode_request_id(request)
        await self._room.wake()
        return pb.WakeResponse()


async def _read_step(
    messages: AsyncIterator[pb.TrainRequest],
) -> tuple[TrainStep, list[TrainSamples], RequestDigest]:
    """The header that comes first, all samples, and what tells a repeat of them.

    Raises:
        RequestError: samples before the header, or two headers.
    """
    step: TrainStep | None = None
    parts: list[TrainSamples] = []
    digest = RequestDigest()
    async for message in messages:
        digest.add(message)
        part = codec.decode_train_request(message)
        if isinstance(part, TrainStep) != (step is None):
            raise RequestError(
                "a Train stream is one header and then samples",
                reason="INVALID_TRAIN_STREAM",
                field="part",
                value="header" if isinstance(part, TrainStep) else "samples",
                remedy="send the header first, and only once",
            )
        if isinstance(part, TrainStep):
            step = part
        else:
            parts.append(part)
    if step is None:
        raise RequestError(
            "the Train stream is empty",
            reason="INVALID_TRAIN_STREAM",
            field="part",
            remedy="send a header and samples",
        )
    return step, parts, digest
