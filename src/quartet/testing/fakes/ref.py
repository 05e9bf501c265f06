"""A ref service whose model was never trained."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc

from quartet import codec
from quartet.api.ref.v1 import ref_service_pb2 as pb
from quartet.api.ref.v1 import ref_service_pb2_grpc as pb_grpc
from quartet.testing.fakes import model
from quartet.testing.fakes.script import Script
from quartet.types import RefInfo, ServerInfo


class FakeRef(pb_grpc.RefServiceServicer):
    """Log-probabilities of the imaginary model before any step.

    Args:
        info: what GetInfo says.
    """

    name = "ref"

    def __init__(self, info: ServerInfo | None = None) -> None:
        self.script = Script()
        self.info = RefInfo(info=info or ServerInfo(service="ref", replica="ref-fake"))
        self.replica = self.info.info.replica

    def register(self, server: grpc.aio.Server) -> str:
        """Add the servicer."""
        pb_grpc.add_RefServiceServicer_to_server(self, server)
        return pb.DESCRIPTOR.services_by_name["RefService"].full_name

    async def start(self) -> None:
        """Nothing to load."""

    async def stop(self) -> None:
        """Nothing to let go."""

    async def GetInfo(self, request: pb.GetInfoRequest, context: Any) -> pb.GetInfoResponse:
        """Answer `info`."""
        await self.script.enter("GetInfo", None)
        return codec.encode_ref_info(self.info)

    async def ComputeLogprobs(
        self, request_iterator: AsyncIterator[pb.ComputeLogprobsRequest], context: Any
    ) -> AsyncIterator[pb.ComputeLogprobsResponse]:
        """Answer each chunk."""
        async for request in request_iterator:
            chunk = codec.decode_compute_logprobs_request(request)
            await self.script.enter("ComputeLogprobs", chunk)
            flat = model.logprobs(chunk.sequences, 0, chunk.temperature)
            yield codec.encode_compute_logprobs_response(chunk.chunk_id, flat)

    async def Sleep(self, request: pb.SleepRequest, context: Any) -> pb.SleepResponse:
        """Do nothing."""
        await self.script.enter("Sleep", codec.decode_request_id(request))
        return pb.SleepResponse()

    async def Wake(self, request: pb.WakeRequest, context: Any) -> pb.WakeResponse:
        """Do nothing."""
        await self.script.enter("Wake", codec.decode_request_id(request))
        return pb.WakeResponse()
