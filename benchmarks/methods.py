"""How each method of the contract is called again, from the messages of a recorded call.

A method that joins the PPO step gets a row in `METHODS`; without one the benchmark says so.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from quartet import codec
from quartet.api.learner.v1 import learner_service_pb2
from quartet.api.ref.v1 import ref_service_pb2
from quartet.api.reward.v1 import reward_service_pb2
from quartet.api.rollout.v1 import rollout_service_pb2
from quartet.clients import Client, LearnerClient, RefClient, RewardClient, RolloutClient
from quartet.clients.base import new_request_id

CLIENTS: dict[type[Client], Any] = {
    RolloutClient: rollout_service_pb2,
    RewardClient: reward_service_pb2,
    RefClient: ref_service_pb2,
    LearnerClient: learner_service_pb2,
}
"""The clients and the modules of their messages."""

Play = Callable[[Any, Sequence[Any]], Awaitable[object]]
"""Makes a call, given a client and the decoded requests of the recorded one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    """One remote procedure."""

    client: type[Client]
    name: str
    decode_request: Callable[[Any], Any]
    decode_response: Callable[[Any], Any]
    play: Play

    @property
    def path(self) -> str:
        """As gRPC names it."""
        return f"/{self.client.service}/{self.name}"

    @property
    def label(self) -> str:
        """As a reader knows it: rollout.Generate."""
        return f"{self.client.room}.{self.name}"

    def requests(self, bodies: Sequence[bytes]) -> list[Any]:
        """The values that recorded requests carry."""
        message = getattr(CLIENTS[self.client], f"{self.name}Request")
        return [self.decode_request(message.FromString(body)) for body in bodies]

    def responses(self, bodies: Sequence[bytes]) -> list[Any]:
        """The values that recorded responses carry."""
        message = getattr(CLIENTS[self.client], f"{self.name}Response")
        return [self.decode_response(message.FromString(body)) for body in bodies]


def _arguments(request: Any) -> dict[str, Any]:
    """A request as arguments, with a request_id that no server has answered yet."""
    values = {each.name: getattr(request, each.name) for each in fields(request)}
    return values | {"request_id": new_request_id()}


async def _generate(client: RolloutClient, requests: Sequence[Any]) -> object:
    return await client.generate(**_arguments(requests[0]))


async def _score(client: RewardClient, requests: Sequence[Any]) -> object:
    return await client.score(**_arguments(requests[0]))


async def _compute_logprobs(client: RefClient, requests: Sequence[Any]) -> object:
    return await client.compute_logprobs(
        [request.sequences for request in requests],
        temperature=requests[0].temperature,
        max_tokens_per_micro_batch=requests[0].max_tokens_per_micro_batch,
    )


async def _forward(client: LearnerClient, requests: Sequence[Any]) -> object:
    return await client.forward(
        [request.sequences for request in requests],
        output=requests[0].output,
        temperature=requests[0].temperature,
        max_tokens_per_micro_batch=requests[0].max_tokens_per_micro_batch,
        with_entropy=requests[0].with_entropy,
    )


async def _train(client: LearnerClient, requests: Sequence[Any]) -> object:
    step, *samples = requests
    return await client.train(replace(step, request_id=new_request_id()), samples)


async def _push(client: LearnerClient, requests: Sequence[Any]) -> object:
    return await client.push_weights(**_arguments(requests[0]))


async def _prepare(client: RolloutClient, requests: Sequence[Any]) -> object:
    return await client.prepare_weights(requests[0])


async def _receive(client: RolloutClient, requests: Sequence[Any]) -> object:
    return [event async for event in client.receive_weights(requests[0])]


async def _commit(client: RolloutClient, requests: Sequence[Any]) -> object:
    return await client.commit_weights(requests[0])


METHODS = (
    Method(
        client=RolloutClient,
        name="Generate",
        decode_request=codec.decode_generate_request,
        decode_response=codec.decode_generate_result,
        play=_generate,
    ),
    Method(
        client=RewardClient,
        name="Score",
        decode_request=codec.decode_score_request,
        decode_response=codec.decode_score_batch,
        play=_score,
    ),
    Method(
        client=RefClient,
        name="ComputeLogprobs",
        decode_request=codec.decode_compute_logprobs_request,
        decode_response=codec.decode_compute_logprobs_response,
        play=_compute_logprobs,
    ),
    Method(
        client=LearnerClient,
        name="Forward",
        decode_request=codec.decode_forward_request,
        decode_response=codec.decode_forward_result,
        play=_forward,
    ),
    Method(
        client=LearnerClient,
        name="Train",
        decode_request=codec.decode_train_request,
        decode_response=codec.decode_train_result,
        play=_train,
    ),
    Method(
        client=LearnerClient,
        name="PushWeights",
        decode_request=codec.decode_push_weights_request,
        decode_response=codec.decode_push_result,
        play=_push,
    ),
    Method(
        client=RolloutClient,
        name="PrepareWeights",
        decode_request=codec.decode_prepare_weights_request,
        decode_response=codec.decode_prepare_weights_result,
        play=_prepare,
    ),
    Method(
        client=RolloutClient,
        name="ReceiveWeights",
        decode_request=codec.decode_receive_weights_request,
        decode_response=codec.decode_receive_event,
        play=_receive,
    ),
    Method(
        client=RolloutClient,
        name="CommitWeights",
        decode_request=codec.decode_commit_weights_request,
        decode_response=codec.decode_commit_weights_result,
        play=_commit,
    ),
)
"""Every method that a PPO step calls."""
