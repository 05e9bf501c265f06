"""`quartet serve reward`."""

from __future__ import annotations

import sys
import uuid
from typing import TYPE_CHECKING

import grpc

from quartet.api.reward.v1 import reward_service_pb2 as pb
from quartet.api.reward.v1 import reward_service_pb2_grpc as pb_grpc
from quartet.config import HttpFrontConfig, RewardServeConfig
from quartet.errors import ConfigError
from quartet.rpc.server import run
from quartet_reward.room import RewardRoom
from quartet_reward.scorer import Scorer
from quartet_reward.scorers import make_scorer
from quartet_reward.servicer import RewardServicer

if TYPE_CHECKING:
    from quartet_reward.http_front import HttpFront


class RewardService:
    """The reward room as `quartet.rpc.server` runs it."""

    name = "reward"

    def __init__(
        self,
        scorer: Scorer,
        *,
        max_concurrent_calls: int = 0,
        http: HttpFrontConfig | None = None,
    ) -> None:
        """Serve one scorer that has not started yet.

        Args:
            scorer: what scores.
            max_concurrent_calls: the server's limit, for GetInfo.
            http: where to answer HTTP as well; None, or one without a port, nowhere.
        """
        self.replica = f"{self.name}-{uuid.uuid4().hex[:8]}"
        self._room = RewardRoom(
            scorer, replica=self.replica, max_concurrent_calls=max_concurrent_calls
        )

        self._http = http
        self._front: HttpFront | None = None
        self.http_address = ""
        """Where HTTP is answered, once started."""

    def register(self, server: grpc.aio.Server) -> str:
        """Add the servicer; returns the full name of the gRPC service."""
        pb_grpc.add_RewardServiceServicer_to_server(RewardServicer(self._room), server)
        return pb.DESCRIPTOR.services_by_name["RewardService"].full_name

    async def start(self) -> None:
        """Load the scorer, and open the HTTP door if there is to be one."""
        await self._room.start()
        if self._http is not None and self._http.port is not None:
            from quartet_reward.http_front import HttpFront

            self._front = HttpFront(self._room, host=self._http.host, port=self._http.port)
            self.http_address = await self._front.start()

    async def stop(self) -> None:
        """Release the scorer."""
        if self._front is not None:
            await self._front.stop()
        await self._room.stop()


def main(config: RewardServeConfig) -> int:
    """Serve until told to stop; returns the exit code."""
    try:
        scorer = make_scorer(config)
    except ConfigError as error:
        print(f"quartet reward: {error}", file=sys.stderr)
        return error.exit_code
    service = RewardService(
        scorer, max_concurrent_calls=config.rpc.max_concurrent_calls, http=config.http
    )
    return run(service, config.rpc, config.metrics)
