"""A reward service that scores by a function of the text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc

from quartet import codec
from quartet.api.reward.v1 import reward_service_pb2 as pb
from quartet.api.reward.v1 import reward_service_pb2_grpc as pb_grpc
from quartet.rpc.idempotency import IdempotencyCache, RequestDigest
from quartet.testing.fakes.script import Script
from quartet.types import (
    Failure,
    Reward,
    RewardInfo,
    ScoreBatch,
    ScoreItem,
    ScoreRequest,
    ScoreResult,
    ServerInfo,
)


def letter_share(item: ScoreItem) -> float:
    """Share of the letter "e" in the query: a number in [0, 1] that anybody can check."""
    return item.query.count("e") / max(len(item.query), 1)


class FakeReward(pb_grpc.RewardServiceServicer):
    """Scores every item with `scorer`.

    Args:
        scorer: the reward of one item.
        info: what GetInfo says.
    """

    name = "reward"

    def __init__(
        self, scorer: Callable[[ScoreItem], float] = letter_share, info: ServerInfo | None = None
    ) -> None:
        self.script = Script()
        self.info = RewardInfo(
            info=info or ServerInfo(service="reward", replica="reward-fake"), scorers=("fake",)
        )
        self.replica = self.info.info.replica
        self._scorer = scorer
        self._failures: dict[str, Failure] = {}
        self._answers: IdempotencyCache[pb.ScoreResponse] = IdempotencyCache()

    def fail_sample(self, sample_id: str, failure: Failure) -> None:
        """Answer `failure` in the place of this sample's score."""
        self._failures[sample_id] = failure

    def register(self, server: grpc.aio.Server) -> str:
        """Add the servicer."""
        pb_grpc.add_RewardServiceServicer_to_server(self, server)
        return pb.DESCRIPTOR.services_by_name["RewardService"].full_name

    async def start(self) -> None:
        """Nothing to load."""

    async def stop(self) -> None:
        """Nothing to let go."""

    async def GetInfo(self, request: pb.GetInfoRequest, context: Any) -> pb.GetInfoResponse:
        """Answer `info`."""
        await self.script.enter("GetInfo", None)
        return codec.encode_reward_info(self.info)

    async def Score(self, request: pb.ScoreRequest, context: Any) -> pb.ScoreResponse:
        """Score every item."""
        asked = codec.decode_score_request(request)
        await self.script.enter("Score", asked)
        return await self._answers.run(
            asked.request_id, RequestDigest(request), lambda: self._score(asked)
        )

    async def _score(self, asked: ScoreRequest) -> pb.ScoreResponse:
        results = tuple(self._result(item) for item in asked.items)
        return codec.encode_score_batch(ScoreBatch(results=results, replica=self.replica))

    def _result(self, item: ScoreItem) -> ScoreResult:
        failure = self._failures.get(item.sample_id)
        if failure is not None:
            return ScoreResult(sample_id=item.sample_id, outcome=failure)
        number = self._scorer(item)
        return ScoreResult(sample_id=item.sample_id, outcome=Reward(reward=number, score=number))

    async def Sleep(self, request: pb.SleepRequest, context: Any) -> pb.SleepResponse:
        """Do nothing."""
        await self.script.enter("Sleep", codec.decode_request_id(request))
        return pb.SleepResponse()

    async def Wake(self, request: pb.WakeRequest, context: Any) -> pb.WakeResponse:
        """Do nothing."""
        await self.script.enter("Wake", codec.decode_request_id(request))
        return pb.WakeResponse()
