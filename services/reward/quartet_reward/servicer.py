"""gRPC door of the reward room: decode, call, encode."""

from __future__ import annotations

import grpc

from quartet import codec
from quartet.api.reward.v1 import reward_service_pb2 as pb
from quartet.api.reward.v1 import reward_service_pb2_grpc as pb_grpc
from quartet.rpc.idempotency import IdempotencyCache, RequestDigest
from quartet_reward.room import RewardRoom


class RewardServicer(pb_grpc.RewardServiceServicer):
    """Answers RewardService. Exceptions become status in the server's interceptor."""

    def __init__(self, room: RewardRoom) -> None:
        """Serve one room."""
        self._room = room
        self._answers = IdempotencyCache[pb.ScoreResponse]()

    async def GetInfo(
        self, request: pb.GetInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetInfoResponse:
        """Say what this server is."""
        return codec.encode_reward_info(self._room.info())

    async def Score(
        self, request: pb.ScoreRequest, context: grpc.aio.ServicerContext
    ) -> pb.ScoreResponse:
        """Score, once a request_id."""
        call = codec.decode_score_request(request)

        async def score() -> pb.ScoreResponse:
            return codec.encode_score_batch(await self._room.score(call))

        return await self._answers.run(call.request_id, RequestDigest(request), score)

    async def Sleep(
        self, request: pb.SleepRequest, context: grpc.aio.ServicerContext
    ) -> pb.SleepResponse:
        """Free device memory."""
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
