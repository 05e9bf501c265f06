"""What does not fit is refused, with the name of the field."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from google.protobuf.duration_pb2 import Duration

from quartet import codec, types
from quartet.api.common.v1 import error_pb2, sequence_pb2, tensor_pb2, weights_pb2
from quartet.api.learner.v1 import learner_service_pb2 as learner_pb
from quartet.api.learner.v1 import loss_pb2
from quartet.api.ref.v1 import ref_service_pb2 as ref_pb
from quartet.api.reward.v1 import reward_service_pb2 as reward_pb
from quartet.api.rollout.v1 import rollout_service_pb2 as rollout_pb
from quartet.errors import DataError, ErrorInfo, RequestError

INT32 = tensor_pb2.DATA_TYPE_INT32
FLOAT32 = tensor_pb2.DATA_TYPE_FLOAT32


def tensor(data_type: Any, shape: list[int], data: bytes) -> tensor_pb2.Tensor:
    return tensor_pb2.Tensor(data_type=data_type, shape=shape, data=data)


def batch(tokens: list[int], lengths: list[int], ids: list[str] | None = None) -> Any:
    return sequence_pb2.SequenceBatch(
        token_ids=codec.encode_tensor(np.array(tokens, np.int32)),
        lengths=codec.encode_tensor(np.array(lengths, np.int32)),
        sample_ids=ids or [],
    )


def generate(**changes: Any) -> rollout_pb.GenerateRequest:
    group = rollout_pb.PromptGroup(group_id="g", prompt_token_ids=[1], num_samples=2)
    fields: dict[str, Any] = {"request_id": "r", "groups": [group], **changes}
    return rollout_pb.GenerateRequest(**fields)


def group(**changes: Any) -> rollout_pb.GenerateRequest:
    fields = {"group_id": "g", "prompt_token_ids": [1], "num_samples": 2, **changes}
    return generate(groups=[rollout_pb.PromptGroup(**fields)])


def sampling(**changes: Any) -> rollout_pb.GenerateRequest:
    return generate(sampling=rollout_pb.SamplingParams(**changes))


def completion(**changes: Any) -> rollout_pb.Completion:
    span = rollout_pb.VersionSpan(policy_version=1, start=0, end=2)
    fields: dict[str, Any] = {
        "token_ids": [1, 2],
        "logprobs": [-1.0, -2.0],
        "finish_reason": sequence_pb2.FINISH_REASON_STOP,
        "versions": [span],
    }
    return rollout_pb.Completion(**{**fields, **changes})


def train(**changes: Any) -> learner_pb.TrainHeader:
    fields: dict[str, Any] = {"request_id": "r", "run_id": "x", "sft": loss_pb2.SftLoss()}
    return learner_pb.TrainHeader(**{**fields, **changes})


def span(start: int, end: int) -> rollout_pb.VersionSpan:
    return rollout_pb.VersionSpan(policy_version=1, start=start, end=end)


CASES: list[tuple[str, Callable[[Any], Any], Any]] = [
    ("tensor.data_type", codec.decode_tensor, tensor(0, [1], b"abcd")),
    ("tensor.data_type", codec.decode_tensor, tensor(99, [1], b"abcd")),
    ("tensor.data", codec.decode_tensor, tensor(INT32, [2], b"abcd")),
    ("tensor.data", codec.decode_tensor, tensor(INT32, [], b"")),
    ("tensor.shape", codec.decode_tensor, tensor(INT32, [-1], b"")),
    ("tensor.shape", codec.decode_tensor, tensor(INT32, [1] * 65, b"abcd")),
    ("tensor.shape", codec.decode_tensor, tensor(INT32, [2**62, 2**62, 0], b"")),
    ("tensor.data", codec.decode_tensor, tensor(tensor_pb2.DATA_TYPE_BOOL, [2], b"\x01\x02")),
    ("sequences.lengths", codec.decode_sequence_batch, batch([1, 2], [1])),
    ("sequences.lengths", codec.decode_sequence_batch, batch([1], [1, 0])),
    ("sequences.token_ids", codec.decode_sequence_batch, batch([-1], [1])),
    ("sequences.sample_ids", codec.decode_sequence_batch, batch([1, 2], [1, 1], ["a"])),
    ("sequences.sample_ids", codec.decode_sequence_batch, batch([1, 2], [1, 1], ["a", "a"])),
    ("sequences.token_ids.data_type", codec.decode_sequence_batch, sequence_pb2.SequenceBatch()),
    ("request_id", codec.decode_generate_request, generate(request_id="")),
    ("groups", codec.decode_generate_request, generate(groups=[])),
    ("logprob_kind", codec.decode_generate_request, generate(logprob_kind=0)),
    ("groups[0].prompt_token_ids", codec.decode_generate_request, group(prompt_token_ids=[])),
    ("groups[0].num_samples", codec.decode_generate_request, group(num_samples=0)),
    ("groups[0].num_samples", codec.decode_generate_request, group(num_samples=2**31 - 1)),
    (
        "groups.num_samples",
        codec.decode_generate_request,
        generate(
            groups=[
                rollout_pb.PromptGroup(group_id=name, prompt_token_ids=[1], num_samples=40_000)
                for name in "ab"
            ]
        ),
    ),
    ("groups[0].seeds", codec.decode_generate_request, group(seeds=[1])),
    ("groups[0].sample_ids", codec.decode_generate_request, group(sample_ids=["a", "b", "c"])),
    ("groups.sample_ids", codec.decode_generate_request, group(sample_ids=["a", "a"])),
    ("sampling.temperature", codec.decode_generate_request, sampling(temperature=-1)),
    ("sampling.temperature", codec.decode_generate_request, sampling(temperature=math.nan)),
    ("sampling.top_p", codec.decode_generate_request, sampling(top_p=0)),
    ("sampling.top_k", codec.decode_generate_request, sampling(top_k=0)),
    ("sampling.max_new_tokens", codec.decode_generate_request, sampling(max_new_tokens=0)),
    ("completion.logprobs", codec.decode_completion, completion(logprobs=[-1.0])),
    ("completion.versions", codec.decode_completion, completion(versions=[])),
    ("completion.versions", codec.decode_completion, completion(versions=[span(0, 1)])),
    ("completion.versions", codec.decode_completion, completion(versions=[span(1, 2)])),
    ("completion.finish_reason", codec.decode_completion, completion(finish_reason=0)),
    ("level", codec.decode_sleep_request, rollout_pb.SleepRequest(request_id="r")),
    ("tags", codec.decode_wake_request, rollout_pb.WakeRequest(request_id="r", tags=["x"])),
    ("mode", codec.decode_pause_request, rollout_pb.PauseRequest(request_id="r")),
    ("items", codec.decode_score_request, reward_pb.ScoreRequest(request_id="r")),
    (
        "item.label_json",
        codec.decode_score_item,
        reward_pb.ScoreItem(sample_id="s", label_json="{"),
    ),
    *(
        (
            "item.label_json",
            codec.decode_score_item,
            reward_pb.ScoreItem(sample_id="s", label_json=opening * depth + "1" + closing * depth),
        )
        for opening, closing in ("[]", ('{"a":', "}"))
        for depth in (101, 100_000)
    ),
    ("item.sample_id", codec.decode_score_item, reward_pb.ScoreItem()),
    ("result.outcome", codec.decode_score_result, reward_pb.ScoreResult(sample_id="s")),
    ("failure.error_class", codec.decode_failure, error_pb2.ErrorDetail()),
    ("run_id", codec.decode_train_step, train(run_id="")),
    ("loss", codec.decode_train_step, train(sft=None)),
    ("micro_batch_size", codec.decode_train_step, train(micro_batch_size=0)),
    ("policy.aggregation", codec.decode_policy_loss, loss_pb2.PolicyLoss(temperature=1)),
    ("part", codec.decode_train_request, learner_pb.TrainRequest()),
    (
        "temperature",
        codec.decode_compute_logprobs_request,
        ref_pb.ComputeLogprobsRequest(sequences=batch([1], [1]), temperature=0),
    ),
    (
        "samples.advantages.shape",
        codec.decode_train_samples,
        learner_pb.TrainSamples(
            sequences=batch([1, 2], [2]), advantages=tensor(FLOAT32, [1], bytes(4))
        ),
    ),
    (
        "samples.advantages.data_type",
        codec.decode_train_samples,
        learner_pb.TrainSamples(sequences=batch([1], [1]), advantages=tensor(INT32, [1], bytes(4))),
    ),
    (
        "manifest.aliases",
        codec.decode_weight_manifest,
        weights_pb2.WeightManifest(bucket_bytes=1, aliases=["head=embed"]),
    ),
    (
        "group_timeout",
        codec.decode_push_weights_request,
        learner_pb.PushWeightsRequest(
            request_id="r", addresses=["a:1"], group_timeout=Duration(seconds=2**62)
        ),
    ),
    (
        "group_timeout",
        codec.decode_push_weights_request,
        learner_pb.PushWeightsRequest(
            request_id="r", addresses=["a:1"], group_timeout=Duration(seconds=-1)
        ),
    ),
    (
        "addresses",
        codec.decode_push_weights_request,
        learner_pb.PushWeightsRequest(request_id="r"),
    ),
    (
        "tag",
        codec.decode_save_checkpoint_request,
        learner_pb.SaveCheckpointRequest(request_id="r", folder="f", tag="../x"),
    ),
]


@pytest.mark.parametrize(("field", "decode", "message"), CASES)
def test_refuses(field: str, decode: Callable[[Any], Any], message: Any) -> None:
    with pytest.raises(RequestError) as caught:
        decode(message)
    assert caught.value.info.field == field
    assert caught.value.info.reason == "INVALID_FIELD"


def test_defaults_of_the_contract() -> None:
    decoded = codec.decode_generate_request(generate())
    assert decoded.sampling == types.SamplingParams()
    assert decoded.logprob_kind is types.LogprobKind.PROCESSED
    assert decoded.min_policy_version is None
    push = codec.decode_push_weights_request(
        learner_pb.PushWeightsRequest(request_id="r", addresses=["a:1"])
    )
    assert (push.backend, push.bucket_bytes, push.group_timeout) == (None, 64 << 20, 30.0)
    chunk = learner_pb.ForwardRequest(sequences=batch([1], [1]))
    assert codec.decode_forward_request(chunk).output is None
    assert codec.decode_forward_request(chunk).temperature == 1.0
    correction = codec.decode_mismatch_correction(
        loss_pb2.MismatchCorrection(level=loss_pb2.CORRECTION_LEVEL_TOKEN)
    )
    assert (correction.mode, correction.gating) == ("mask", "ratio")


def test_zero_is_not_unset() -> None:
    decoded = codec.decode_generate_request(
        generate(sampling=rollout_pb.SamplingParams(temperature=0, min_new_tokens=0))
    )
    assert decoded.sampling.temperature == 0
    assert decoded.sampling.min_new_tokens == 0


def test_bfloat16_widens_exactly() -> None:
    bits = np.array([0x3F80, 0xC000, 0x7F80, 0x0000], np.uint16)  # 1, -2, inf, 0
    message = tensor(tensor_pb2.DATA_TYPE_BFLOAT16, [2, 2], bits.tobytes())
    expected = np.array([[1, -2], [np.inf, 0]], np.float32)
    assert np.array_equal(codec.decode_tensor(message), expected)


def test_decoded_array_is_a_view_of_the_bytes() -> None:
    array = codec.decode_tensor(codec.encode_tensor(np.arange(4, dtype=np.int32)))
    assert not array.flags.owndata
    assert not array.flags.writeable


def test_big_endian_arrays_travel_little_endian() -> None:
    message = codec.encode_tensor(np.array([1, 2], ">i4"))
    assert message.data == bytes([1, 0, 0, 0, 2, 0, 0, 0])


def test_unknown_dtype_cannot_be_sent() -> None:
    with pytest.raises(TypeError, match="complex"):
        codec.encode_tensor(np.zeros(1, np.complex64))


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_score_that_is_no_number(number: float) -> None:
    message = reward_pb.ScoreResult(
        sample_id="s", reward=reward_pb.Reward(reward=1, score=1, extra_logs={"x": number})
    )
    with pytest.raises(DataError) as caught:
        codec.decode_score_result(message)
    assert (caught.value.info.sample_id, caught.value.info.field) == ("s", "x")
    with pytest.raises(DataError):
        codec.encode_reward(types.Reward(reward=number, score=1))


def test_label_that_is_no_json() -> None:
    item = types.ScoreItem(sample_id="s", prompt="", query="", label={1, 2})
    with pytest.raises(RequestError, match="label of s is no JSON"):
        codec.encode_score_item(item)


def test_label_as_deep_as_allowed() -> None:
    text = "[" * 100 + "1" + "]" * 100
    item = codec.decode_score_item(reward_pb.ScoreItem(sample_id="s", label_json=text))
    assert codec.encode_score_item(item).label_json == text


def test_error_detail_keeps_everything() -> None:
    info = ErrorInfo(
        reason="R", field="f", value="v", remedy="m", sample_id="s", replica="p", retry_after=0.5
    )
    message = codec.encode_error_detail("DATA", "sentence", info)
    assert codec.decode_error_detail(message) == ("DATA", "sentence", info)


def test_maps_come_out_sorted() -> None:
    values = dict.fromkeys("zyxwvutsrqponmlkjihgfedcba", 0.0)
    result = types.TrainResult(optimizer_steps=1, metrics=values)
    decoded = codec.decode_train_result(codec.encode_train_result(result))
    assert list(decoded.metrics) == sorted(values)
