"""`quartet serve rollout`."""

from __future__ import annotations

import sys
import uuid

import grpc

from quartet.api.rollout.v1 import rollout_service_pb2 as pb
from quartet.api.rollout.v1 import rollout_service_pb2_grpc as pb_grpc
from quartet.config import RolloutServeConfig
from quartet.data.tokenizer import fingerprint
from quartet.errors import ConfigError, QuartetError
from quartet.rpc.server import run
from quartet_rollout.engines import find_engine
from quartet_rollout.room import RolloutRoom
from quartet_rollout.servicer import RolloutServicer


class RolloutService:
    """The rollout room as `quartet.rpc.server` runs it."""

    name = "rollout"

    def __init__(self, config: RolloutServeConfig) -> None:
        """Serve what `config` says. Nothing is loaded before `start`.

        Raises:
            ConfigError: No model, or an engine that is not in this build.
        """
        self.replica = f"{self.name}-{uuid.uuid4().hex[:8]}"
        model = config.rollout.model_name_or_path
        if not model:
            raise ConfigError(
                "rollout.model_name_or_path is not set",
                field="rollout.model_name_or_path",
                remedy="name the model to generate with, a folder or a hub id",
            )
        open_engine = find_engine(config.rollout.engine)
        self.room = RolloutRoom(
            lambda: open_engine(config),
            replica=self.replica,
            model_name_or_path=model,
            fingerprint=lambda: fingerprint(model),
            max_concurrent_calls=config.rpc.max_concurrent_calls,
        )

    def register(self, server: grpc.aio.Server) -> str:
        """Add the servicer; returns the full name of the gRPC service."""
        pb_grpc.add_RolloutServiceServicer_to_server(RolloutServicer(self.room), server)
        return pb.DESCRIPTOR.services_by_name["RolloutService"].full_name

    async def start(self) -> None:
        """Load the engine."""
        await self.room.start()

    async def failed(self) -> QuartetError:
        """Wait until the engine is gone for good: then the process ends, to be started again."""
        return await self.room.failed()

    async def stop(self) -> None:
        """Let go of the engine."""
        await self.room.stop()


def main(config: RolloutServeConfig) -> int:
    """Serve until told to stop; returns the exit code."""
    try:
        service = RolloutService(config)
    except ConfigError as error:
        print(f"quartet rollout: {error}", file=sys.stderr)
        return error.exit_code
    return run(service, config.rpc, config.metrics)
