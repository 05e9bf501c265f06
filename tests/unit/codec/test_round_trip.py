"""Every value type survives the wire. Strategies follow the types: a new field is covered."""

from __future__ import annotations

import dataclasses
import enum
import re
import types as python_types
import typing
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from quartet import codec, types
from quartet.types.requests import SavedFolder

names = st.text(min_size=1, max_size=8).filter(lambda text: text.strip())
texts = st.text(max_size=12)
finite = st.floats(allow_nan=False, allow_infinity=False)
counts = st.integers(0, 2**31 - 1)
positive = st.integers(1, 2**31 - 1)
unit = st.floats(0, 1)
tokens = st.integers(0, 2**31 - 1)
# Durations travel in nanoseconds; whole microseconds come back exactly.
seconds = st.integers(0, 10**9).map(lambda micros: micros / 1e6)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | finite | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)


def vectors(dtype: type[np.generic], length: int) -> st.SearchStrategy[Any]:
    """Arrays of one dimension, infinities and NaN included: the wire does not judge."""
    return hnp.arrays(np.dtype(dtype), length)


@st.composite
def sequence_batches(draw: st.DrawFn, multiple: int = 1) -> types.SequenceBatch:
    lengths = draw(st.lists(st.integers(1, 5), max_size=4))
    lengths = lengths[: len(lengths) // multiple * multiple]
    sequences = [draw(st.lists(tokens, min_size=n, max_size=n)) for n in lengths]
    count = len(lengths)
    ids = draw(st.just([]) | st.lists(names, min_size=count, max_size=count, unique=True))
    return types.SequenceBatch.of(sequences, ids)


@st.composite
def completions(draw: st.DrawFn) -> types.Completion:
    sample_id = draw(texts)
    if draw(st.booleans()):
        return types.Completion(sample_id=sample_id, failure=draw(value_of(types.Failure)))
    ends = sorted(draw(st.lists(st.integers(0, 4), max_size=3)))
    spans = tuple(
        types.VersionSpan(policy_version=draw(counts), start=start, end=end)
        for start, end in zip([0, *ends], ends, strict=False)
    )
    length = ends[-1] if ends else 0
    return types.Completion(
        sample_id=sample_id,
        token_ids=draw(vectors(np.int32, length)),
        logprobs=draw(vectors(np.float32, length)),
        finish_reason=draw(st.sampled_from(types.FinishReason)),
        versions=spans,
    )


@st.composite
def prompt_groups(draw: st.DrawFn, prefix: str = "") -> types.PromptGroup:
    count = draw(st.integers(1, 3))
    some = st.just(()) | st.tuples(*[st.integers(0, 2**64 - 1)] * count)
    ids = tuple(f"{prefix}{i}" for i in range(count))
    return types.PromptGroup(
        group_id=prefix + draw(names),
        prompt_token_ids=tuple(draw(st.lists(tokens, min_size=1, max_size=4))),
        num_samples=count,
        seeds=draw(some),
        sample_ids=draw(st.sampled_from([(), ids])),
    )


@st.composite
def manifests(draw: st.DrawFn) -> types.WeightManifest:
    specs = draw(st.lists(value_of(types.TensorSpec), max_size=3, unique_by=lambda s: s.name))
    tensors = [spec.name for spec in specs]
    alias = names.filter(lambda text: "=" not in text)
    ties = draw(st.dictionaries(alias, st.sampled_from(tensors), max_size=2)) if tensors else {}
    return types.WeightManifest(tensors=tuple(specs), bucket_bytes=draw(positive), aliases=ties)


@st.composite
def train_samples(draw: st.DrawFn) -> types.TrainSamples:
    batch = draw(sequence_batches(multiple=2))
    floats = ["advantages", "old_logprobs", "ref_logprobs", "rollout_logprobs"]
    floats += ["returns", "old_values"]
    arrays = {name: draw(st.none() | vectors(np.float32, batch.num_tokens)) for name in floats}
    return types.TrainSamples(
        sequences=batch,
        action_mask=draw(st.none() | vectors(np.bool_, batch.num_tokens)),
        margins=draw(st.none() | vectors(np.float32, len(batch) // 2)),
        rollout_logprob_spec=draw(st.none() | value_of(types.LogprobSpec)),
        **arrays,
    )


@st.composite
def sampling_params(draw: st.DrawFn) -> types.SamplingParams:
    fewest = draw(st.integers(0, 10))
    return types.SamplingParams(
        temperature=draw(st.floats(0, 10)),
        top_p=draw(st.floats(0, 1, exclude_min=True)),
        top_k=draw(st.just(-1) | positive),
        max_new_tokens=draw(st.none() | st.integers(max(fewest, 1), 100)),
        min_new_tokens=fewest,
        stop_token_ids=tuple(draw(st.lists(tokens, max_size=3))),
        ignore_eos=draw(st.booleans()),
    )


@st.composite
def generate_requests(draw: st.DrawFn) -> types.GenerateRequest:
    prefixes = ["a", "b"][: draw(st.integers(1, 2))]
    return types.GenerateRequest(
        request_id=draw(names),
        groups=tuple(draw(prompt_groups(prefix)) for prefix in prefixes),
        sampling=draw(sampling_params()),
        logprob_kind=draw(st.sampled_from(types.LogprobKind)),
        min_policy_version=draw(st.none() | counts),
        isolated=draw(st.booleans()),
    )


@st.composite
def score_items(draw: st.DrawFn) -> types.ScoreItem:
    ids = tuple(draw(st.lists(tokens, max_size=4)))
    return types.ScoreItem(
        sample_id=draw(names),
        prompt=draw(texts),
        query=draw(texts),
        label=draw(json_values),
        token_ids=ids,
        prompt_length=draw(st.integers(0, len(ids))),
        truncated=draw(st.booleans()),
    )


items = st.lists(score_items(), min_size=1, max_size=3, unique_by=lambda item: item.sample_id)
finite_numbers = st.dictionaries(names, finite, max_size=3)
temperatures = st.floats(0.01, 10)

CUSTOM: dict[type, st.SearchStrategy[Any]] = {
    types.SequenceBatch: sequence_batches(),
    types.Completion: completions(),
    types.PromptGroup: prompt_groups(),
    types.WeightManifest: manifests(),
    types.TrainSamples: train_samples(),
    types.SamplingParams: sampling_params(),
    types.GenerateRequest: generate_requests(),
    types.ScoreItem: score_items(),
}
FIELDS: dict[tuple[type, str], st.SearchStrategy[Any]] = {
    (types.LogprobSpec, "temperature"): st.floats(0, 10),
    (types.LogprobSpec, "top_p"): st.floats(0, 1, exclude_min=True),
    (types.LogprobSpec, "top_k"): st.just(-1) | positive,
    (types.VersionSpan, "end"): st.integers(2**30, 2**31 - 1),
    (types.VersionSpan, "start"): st.integers(0, 2**30),
    (types.Failure, "error_class"): st.sampled_from(["INFRA", "DATA", "REQUEST", "FATAL"]),
    (types.ScoreRequest, "items"): items.map(tuple),
    (types.TensorSpec, "dtype"): st.sampled_from(["float32", "bfloat16", "int64", "bool"]),
    (types.TensorSpec, "shape"): st.lists(counts, max_size=3).map(tuple),
    (types.Rendezvous, "ipc_handles"): st.dictionaries(texts, st.binary(max_size=4), max_size=2),
    (types.IpcSegment, "size_bytes"): positive,
    (types.IpcSegment, "gpu_uuid"): st.just("") | names,
    (types.IpcSegment, "cuda_handle"): st.binary(min_size=64, max_size=64),
    (types.IpcSegment, "inode"): st.integers(0, 2**64 - 1),
    (types.ReceiveEvent, "event"): st.sampled_from(["ready", "bucket", "done", "failed"]),
    (types.MismatchCorrection, "threshold_low"): st.floats(0, 1),
    (types.MismatchCorrection, "threshold_high"): st.floats(1, 10),
    (types.PolicyLoss, "dual_clip"): st.none() | st.floats(1.5, 10),
    (types.PolicyLoss, "aggregation_length"): positive,
    (types.PolicyLoss, "temperature"): temperatures,
    (types.OptimizerConfig, "betas"): st.tuples(st.floats(0, 0.999), st.floats(0, 0.999)),
    (types.OptimizerConfig, "lr"): st.floats(0, 1),
    (types.ScheduleConfig, "warmup_ratio"): unit,
    (types.ScheduleConfig, "min_lr_ratio"): unit,
    (types.RunSpec, "max_norm"): st.floats(0, 100),
    (types.RunSpec, "ema_beta"): st.none() | st.floats(0, 0.999),
    (types.RunSpec, "seed"): st.integers(-(2**63), 2**63 - 1),
    (types.ForwardRequest, "temperature"): temperatures,
    (types.ComputeLogprobsRequest, "temperature"): temperatures,
    (types.ForwardResult, "output"): vectors(np.float32, 3),
    (types.ForwardResult, "entropy"): st.none() | vectors(np.float32, 3),
    (types.PushWeightsRequest, "group_timeout"): seconds,
    (types.PushWeightsRequest, "addresses"): st.lists(names, min_size=1, max_size=2).map(tuple),
    (types.PrepareWeightsRequest, "group_timeout"): st.integers(1, 10**6).map(lambda m: m / 1e3),
    (types.PrepareWeightsRequest, "rank"): st.integers(0, 5),
    (types.PrepareWeightsRequest, "world_size"): st.integers(6, 9),
    (types.SaveCheckpointRequest, "tag"): st.sampled_from(["step_1", "best"]),
    (types.LoadCheckpointRequest, "tag"): st.sampled_from(["", "step_1"]),
    (types.SleepRequest, "level"): st.sampled_from([1, 2]),
    (types.WakeRequest, "tags"): st.sampled_from([(), ("weights",), ("kv_cache", "weights")]),
    (types.Reward, "extra_logs"): finite_numbers,
    (types.ExportModelRequest, "config_values"): finite_numbers,
}


def value_of(cls: type) -> st.SearchStrategy[Any]:
    """Values of a type, by its fields."""
    if cls in CUSTOM:
        return CUSTOM[cls]
    if issubclass(cls, enum.Enum):
        return st.sampled_from(cls)
    hints = typing.get_type_hints(cls)
    fields = {
        field.name: FIELDS.get((cls, field.name), by_hint(hints[field.name], field.name))
        for field in dataclasses.fields(cls)
    }
    return st.builds(cls, **fields)


def by_hint(hint: Any, name: str) -> st.SearchStrategy[Any]:
    """Values of one field, by its annotation and its name."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (python_types.UnionType, typing.Union):
        return st.one_of([by_hint(each, name) for each in arguments])
    if origin is typing.Literal:
        return st.sampled_from(arguments)
    if origin is tuple:
        return st.lists(by_hint(arguments[0], name), max_size=3).map(tuple)
    if origin in (Mapping, dict):
        return st.dictionaries(names, by_hint(arguments[1], name), max_size=3)
    if hint is type(None):
        return st.none()
    if hint is str:
        return names
    if hint is bool:
        return st.booleans()
    if hint is int:
        return positive
    if hint is float:
        return seconds if "seconds" in name else finite
    if hint is bytes:
        return st.binary(max_size=8)
    if isinstance(hint, type):
        return value_of(hint)
    return st.nothing()


def same(left: Any, right: Any) -> bool:
    """Equal to the last bit, arrays and NaN included."""
    if type(left) is not type(right):
        return False
    if isinstance(left, np.ndarray):
        return (
            left.dtype == right.dtype
            and left.shape == right.shape
            and (left.tobytes() == right.tobytes())
        )
    if dataclasses.is_dataclass(left):
        return all(
            same(getattr(left, field.name), getattr(right, field.name))
            for field in dataclasses.fields(left)
        )
    if isinstance(left, tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right


def snake(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


PLAIN = sorted(set(types.__all__) - {"SavedFolder", "Loss"})


def round_trip(name: str, value: Any) -> Any:
    message = getattr(codec, f"encode_{name}")(value)
    if hasattr(message, "SerializeToString"):
        message = type(message).FromString(message.SerializeToString())
    return getattr(codec, f"decode_{name}")(message)


@pytest.mark.parametrize("name", PLAIN)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_round_trip(name: str, data: st.DataObject) -> None:
    value = data.draw(value_of(getattr(types, name)))
    assert same(round_trip(snake(name), value), value)


LOSSES = [types.PolicyLoss, types.ValueLoss, types.SftLoss, types.PairwiseLoss, types.DpoLoss]


@pytest.mark.parametrize("cls", LOSSES)
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_loss_round_trip(cls: type, data: st.DataObject) -> None:
    value = data.draw(value_of(cls))
    assert same(round_trip("loss", value), value)


@settings(max_examples=10, deadline=None)
@given(value=value_of(SavedFolder))
def test_saved_folder_round_trip(value: SavedFolder) -> None:
    assert round_trip("save_checkpoint_result", value) == value
    assert round_trip("export_model_result", value) == value


@settings(max_examples=20, deadline=None)
@given(part=value_of(types.TrainStep) | train_samples())
def test_train_stream_round_trip(part: Any) -> None:
    assert same(round_trip("train_request", part), part)


DTYPES = [np.bool_, np.uint8, np.int32, np.int64, np.float16, np.float32, np.float64]


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_tensor_round_trip(dtype: type[np.generic], data: st.DataObject) -> None:
    shapes = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)
    array = data.draw(hnp.arrays(np.dtype(dtype), shapes))
    assert same(round_trip("tensor", array), array)
    assert same(round_trip("tensor", array.T), np.ascontiguousarray(array.T).reshape(array.T.shape))


def test_every_type_has_a_codec() -> None:
    missing = [
        f"{verb}_{snake(name)}"
        for name in types.__all__
        if name != "SavedFolder"
        for verb in ("encode", "decode")
        if not hasattr(codec, f"{verb}_{snake(name)}")
    ]
    assert missing == []
