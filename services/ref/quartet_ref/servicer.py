"""gRPC door of the ref room: decode, call, encode."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc

from quartet import __version__, codec
from quartet.api.ref.v1 import ref_service_pb2 as pb
from quartet.api.ref.v1 import ref_service_pb2_grpc as pb_grpc
from quartet.types import RefInfo, ServerInfo
from quartet_ref.model import RefModel


class RefServicer(pb_grpc.RefServiceServicer):
    """Answers RefService. Exceptions become status in the server's interceptor."""

    def __init__(self, model: RefModel, *, replica: str, max_concurrent_calls: int = 0) -> None:
        """Serve one model.

        Args:
            model: what answers.
            replica: name of this server among its replicas.
            max_concurrent_calls: the server's limit, for GetInfo.
        """
        self._model = model
        self._replica = replica
        self._max_concurrent_calls = max_concurrent_calls

    async def GetInfo(
        self, request: pb.GetInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetInfoResponse:
        """Say what this server is."""
        info = ServerInfo(
            service="ref",
            server_version=__version__,
            replica=self._replica,
            digest=self._model.digest,
            tokenizer_fingerprint=self._model.tokenizer_fingerprint,
            capabilities=("sleep",),
            max_sequence_length=self._model.max_sequence_length,
            max_concurrent_calls=self._max_concurrent_calls,
            model_name_or_path=self._model.name_or_path,
        )
        return codec.encode_ref_info(RefInfo(info=info))

    async def ComputeLogprobs(
        self,
        request_iterator: AsyncIterator[pb.ComputeLogprobsRequest],
        context: grpc.aio.ServicerContext,
    ) -> AsyncIterator[pb.ComputeLogprobsResponse]:
        """One answer a chunk, in order. The next chunk is read when its turn has come."""
        async for message in request_iterator:
            chunk = codec.decode_compute_logprobs_request(message)
            logprobs = await self._model.compute(chunk)
            yield codec.encode_compute_logprobs_response(chunk.chunk_id, logprobs)

    async def Sleep(
        self, request: pb.SleepRequest, context: grpc.aio.ServicerContext
    ) -> pb.SleepResponse:
        """Free device memory."""
        codec.decode_request_id(request)
        await self._model.sleep()
        return pb.SleepResponse()

    async def Wake(
        self, request: pb.WakeRequest, context: grpc.aio.ServicerContext
    ) -> pb.WakeResponse:
        """Take it back."""
        codec.decode_request_id(request)
        await self._model.wake()
        return pb.WakeResponse()
