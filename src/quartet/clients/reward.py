"""Client of the reward service."""

from __future__ import annotations

from collections.abc import Sequence

from quartet import codec
from quartet.api.reward.v1 import reward_service_pb2 as pb
from quartet.api.reward.v1.reward_service_pb2_grpc import RewardServiceStub
from quartet.clients.base import Client, new_request_id
from quartet.types import RewardInfo, ScoreBatch, ScoreItem, ScoreRequest


class RewardClient(Client):
    """Scores completions."""

    room = "reward"
    service = "quartet.api.reward.v1.RewardService"
    stub_class = RewardServiceStub

    async def get_info(self, *, timeout: float | None = None) -> RewardInfo:
        """What the server says of itself."""
        answer = await self._unary("GetInfo", pb.GetInfoRequest(), timeout=timeout)
        return self._read(codec.decode_reward_info, answer)

    async def score(
        self,
        *,
        request_id: str,
        items: Sequence[ScoreItem],
        tokenizer_fingerprint: str = "",
        timeout: float | None = None,
    ) -> ScoreBatch:
        """Score samples. One result for each item, in their order: a reward or a failure.

        Args:
            request_id: the same when the call is repeated; nothing is scored twice.
            items: at least one.
            tokenizer_fingerprint: of the tokenizer that made the items' token_ids.
            timeout: seconds; None takes the deadline of rpc.policy.
        """
        request = ScoreRequest(
            request_id=request_id, items=tuple(items), tokenizer_fingerprint=tokenizer_fingerprint
        )
        message = codec.encode_score_request(request)
        answer = await self._unary("Score", message, timeout=timeout, request_id=request_id)
        batch = self._read(codec.decode_score_batch, answer)
        if [result.sample_id for result in batch.results] != [item.sample_id for item in items]:
            raise self._broken("the results are not those of the items, in order")
        return batch

    async def sleep(self, *, request_id: str = "", timeout: float | None = None) -> None:
        """Free device memory."""
        message = codec.encode_reward_sleep_request(request_id or new_request_id())
        await self._unary("Sleep", message, timeout=timeout)

    async def wake(self, *, request_id: str = "", timeout: float | None = None) -> None:
        """Take device memory back."""
        message = codec.encode_reward_wake_request(request_id or new_request_id())
        await self._unary("Wake", message, timeout=timeout)
