"""Messages of quartet.api.reward.v1."""

from __future__ import annotations

import json
import math

from quartet.api.reward.v1 import reward_service_pb2 as pb
from quartet.codec.check import at_least, decode_request_id, distinct, invalid, present
from quartet.codec.common import (
    decode_failure,
    decode_server_info,
    encode_failure,
    encode_server_info,
)
from quartet.errors import DataError
from quartet.types import (
    Failure,
    Reward,
    RewardInfo,
    ScoreBatch,
    ScoreItem,
    ScoreRequest,
    ScoreResult,
)

# Made once: `json.dumps` with these arguments makes an encoder each time.
_JSON = json.JSONEncoder(ensure_ascii=False, allow_nan=False)
# Python walks JSON with its own stack: what one process just reads, the next may not.
_MAX_LABEL_DEPTH = 100


def encode_reward_info(info: RewardInfo) -> pb.GetInfoResponse:
    """Encode the answer of GetInfo."""
    return pb.GetInfoResponse(
        info=encode_server_info(info.info),
        scorers=info.scorers,
        max_samples_per_call=info.max_samples_per_call,
        needs_token_ids=info.needs_token_ids,
        normalizes=info.normalizes,
    )


def decode_reward_info(message: pb.GetInfoResponse) -> RewardInfo:
    """Decode the answer of GetInfo."""
    at_least(0, message.max_samples_per_call, "max_samples_per_call")
    return RewardInfo(
        info=decode_server_info(message.info),
        scorers=tuple(message.scorers),
        max_samples_per_call=message.max_samples_per_call,
        needs_token_ids=message.needs_token_ids,
        normalizes=message.normalizes,
    )


def encode_score_item(item: ScoreItem) -> pb.ScoreItem:
    """Encode one completion. Raises RequestError when the label is no JSON value."""
    try:
        label = _JSON.encode(item.label)
    except (TypeError, ValueError, RecursionError) as error:
        raise invalid("label", item.label, f"of {item.sample_id} is no JSON: {error}") from error
    return pb.ScoreItem(
        sample_id=item.sample_id,
        prompt=item.prompt,
        query=item.query,
        label_json=label,
        token_ids=item.token_ids,
        prompt_length=item.prompt_length,
        truncated=item.truncated,
    )


def decode_score_item(message: pb.ScoreItem, field: str = "item") -> ScoreItem:
    """Decode one completion."""
    try:
        label = json.loads(message.label_json) if message.label_json else ""
    except (ValueError, RecursionError) as error:
        raise invalid(f"{field}.label_json", message.label_json, f"is no JSON: {error}") from error
    if _is_deep(label):
        raise invalid(
            f"{field}.label_json",
            message.label_json,
            f"is nested more than {_MAX_LABEL_DEPTH} deep",
            "send what is inside as a string",
        )
    at_least(0, message.prompt_length, f"{field}.prompt_length")
    if message.token_ids and message.prompt_length > len(message.token_ids):
        raise invalid(
            f"{field}.prompt_length",
            message.prompt_length,
            f"is {message.prompt_length}, above the {len(message.token_ids)} tokens there are",
        )
    return ScoreItem(
        sample_id=present(message.sample_id, f"{field}.sample_id"),
        prompt=message.prompt,
        query=message.query,
        label=label,
        token_ids=tuple(message.token_ids),
        prompt_length=message.prompt_length,
        truncated=message.truncated,
    )


def _is_deep(value: object) -> bool:
    """Whether lists and dicts stand in one another beyond _MAX_LABEL_DEPTH."""
    level = [value]
    for _ in range(_MAX_LABEL_DEPTH + 1):
        children: list[object] = []
        for each in level:
            if isinstance(each, dict):
                children += each.values()
            elif isinstance(each, list):
                children += each
        if not children:
            return False
        level = children
    return True


def encode_score_request(request: ScoreRequest) -> pb.ScoreRequest:
    """Encode a call of Score."""
    return pb.ScoreRequest(
        request_id=request.request_id,
        items=[encode_score_item(item) for item in request.items],
        tokenizer_fingerprint=request.tokenizer_fingerprint,
    )


def decode_score_request(message: pb.ScoreRequest) -> ScoreRequest:
    """Decode a call of Score: at least one sample, no name twice."""
    if not message.items:
        raise invalid("items", 0, "has no sample to score")
    distinct([item.sample_id for item in message.items], "items.sample_id")
    return ScoreRequest(
        request_id=decode_request_id(message),
        items=tuple(decode_score_item(m, f"items[{i}]") for i, m in enumerate(message.items)),
        tokenizer_fingerprint=message.tokenizer_fingerprint,
    )


def encode_reward(reward: Reward) -> pb.Reward:
    """Encode a score. Raises DataError when a number is not finite."""
    _check_finite(reward, "")
    return pb.Reward(reward=reward.reward, score=reward.score, extra_logs=dict(reward.extra_logs))


def decode_reward(message: pb.Reward, sample_id: str = "") -> Reward:
    """Decode a score. Raises DataError when a number is not finite."""
    reward = Reward(
        reward=message.reward,
        score=message.score,
        extra_logs=dict(sorted(message.extra_logs.items())),
    )
    _check_finite(reward, sample_id)
    return reward


def encode_score_result(result: ScoreResult) -> pb.ScoreResult:
    """Encode the outcome for one sample."""
    outcome = result.outcome
    if isinstance(outcome, Failure):
        return pb.ScoreResult(sample_id=result.sample_id, failure=encode_failure(outcome))
    _check_finite(outcome, result.sample_id)
    return pb.ScoreResult(sample_id=result.sample_id, reward=encode_reward(outcome))


def decode_score_result(message: pb.ScoreResult, field: str = "result") -> ScoreResult:
    """Decode the outcome for one sample: a reward or a failure, never neither."""
    sample_id = present(message.sample_id, f"{field}.sample_id")
    kind = message.WhichOneof("outcome")
    if kind == "reward":
        return ScoreResult(sample_id=sample_id, outcome=decode_reward(message.reward, sample_id))
    if kind == "failure":
        failure = decode_failure(message.failure, f"{field}.failure")
        return ScoreResult(sample_id=sample_id, outcome=failure)
    raise invalid(f"{field}.outcome", "", "is neither a reward nor a failure")


def encode_score_batch(batch: ScoreBatch) -> pb.ScoreResponse:
    """Encode the answer of Score."""
    return pb.ScoreResponse(
        results=[encode_score_result(result) for result in batch.results],
        replica=batch.replica,
        server_version=batch.server_version,
        digest=batch.digest,
    )


def decode_score_batch(message: pb.ScoreResponse) -> ScoreBatch:
    """Decode the answer of Score."""
    return ScoreBatch(
        results=tuple(
            decode_score_result(m, f"results[{i}]") for i, m in enumerate(message.results)
        ),
        replica=message.replica,
        server_version=message.server_version,
        digest=message.digest,
    )


def encode_reward_sleep_request(request_id: str) -> pb.SleepRequest:
    """Encode a call of Sleep; `decode_request_id` reads it."""
    return pb.SleepRequest(request_id=request_id)


def encode_reward_wake_request(request_id: str) -> pb.WakeRequest:
    """Encode a call of Wake; `decode_request_id` reads it."""
    return pb.WakeRequest(request_id=request_id)


def _check_finite(reward: Reward, sample_id: str) -> None:
    numbers = {"reward": reward.reward, "score": reward.score, **reward.extra_logs}
    for name, number in numbers.items():
        if not math.isfinite(number):
            raise DataError(
                f"{name} is {number}, not a finite number",
                reason="NOT_FINITE",
                field=name,
                value=str(number),
                sample_id=sample_id,
            )
