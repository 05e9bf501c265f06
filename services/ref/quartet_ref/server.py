"""`quartet serve ref`."""

from __future__ import annotations

import sys
import uuid

import grpc

from quartet.api.ref.v1 import ref_service_pb2 as pb
from quartet.api.ref.v1 import ref_service_pb2_grpc as pb_grpc
from quartet.config import RefServeConfig
from quartet.errors import ConfigError
from quartet.rpc.server import run
from quartet_ref.model import RefModel
from quartet_ref.servicer import RefServicer


class RefService:
    """The ref room as `quartet.rpc.server` runs it."""

    name = "ref"

    def __init__(self, model: RefModel, *, max_concurrent_calls: int = 0) -> None:
        """Serve one model that is not loaded yet.

        Args:
            model: what answers.
            max_concurrent_calls: the server's limit, for GetInfo.
        """
        self.replica = f"{self.name}-{uuid.uuid4().hex[:8]}"
        self._model = model
        self._servicer = RefServicer(
            model, replica=self.replica, max_concurrent_calls=max_concurrent_calls
        )

    def register(self, server: grpc.aio.Server) -> str:
        """Add the servicer; returns the full name of the gRPC service."""
        pb_grpc.add_RefServiceServicer_to_server(self._servicer, server)
        return pb.DESCRIPTOR.services_by_name["RefService"].full_name

    async def start(self) -> None:
        """Load the model."""
        await self._model.start()

    async def stop(self) -> None:
        """Let go of it."""
        await self._model.stop()


def main(config: RefServeConfig) -> int:
    """Serve until told to stop; returns the exit code."""
    try:
        model = RefModel(config)
    except ConfigError as error:
        print(f"quartet ref: {error}", file=sys.stderr)
        return error.exit_code
    service = RefService(model, max_concurrent_calls=config.rpc.max_concurrent_calls)
    return run(service, config.rpc, config.metrics)
