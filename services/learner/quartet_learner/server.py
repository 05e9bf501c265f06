"""`quartet serve learner`."""

from __future__ import annotations

import os
import sys

import grpc

from quartet.api.learner.v1 import learner_service_pb2 as pb
from quartet.api.learner.v1 import learner_service_pb2_grpc as pb_grpc
from quartet.config import LearnerServeConfig, RpcConfig
from quartet.errors import ConfigError
from quartet.rpc.server import run
from quartet_learner.follower import follow
from quartet_learner.ranks import rank_by_launcher
from quartet_learner.room import LearnerRoom
from quartet_learner.servicer import LearnerServicer
from quartet_learner.settings import LearnerSettings, settings_from_config


class LearnerService:
    """The learner as `quartet.rpc.server` runs it."""

    name = "learner"

    def __init__(self, settings: LearnerSettings, *, rpc: RpcConfig | None = None) -> None:
        """Serve one model that is not loaded yet."""
        self._room = LearnerRoom(settings, rpc=rpc)
        self.replica = self._room.replica

    def register(self, server: grpc.aio.Server) -> str:
        """Add the servicer; returns the full name of the gRPC service."""
        pb_grpc.add_LearnerServiceServicer_to_server(LearnerServicer(self._room), server)
        return pb.DESCRIPTOR.services_by_name["LearnerService"].full_name

    async def start(self) -> None:
        """Load the model on all ranks."""
        await self._room.start()

    async def stop(self) -> None:
        """End all ranks."""
        await self._room.stop()


def main(config: LearnerServeConfig) -> int:
    """Serve until told to stop; returns the exit code. Under a launcher other ranks follow."""
    if not config.ds.adam_offload:
        # Threads of several services fight over few cores; an optimizer on the CPU needs them.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        settings = settings_from_config(config)
    except ConfigError as error:
        print(f"quartet learner: {error}", file=sys.stderr)
        return error.exit_code
    if rank_by_launcher() > 0:
        return follow(settings)
    service = LearnerService(settings, rpc=config.rpc)
    return run(service, config.rpc, config.metrics)
