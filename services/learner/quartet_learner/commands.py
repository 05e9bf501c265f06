"""What rank 0 can ask of all ranks: a name, how its arguments travel, and what an engine does.

To add a command: its line in COMMANDS, and a method of LearnerEngine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message

from quartet import codec
from quartet.api.common.v1 import weights_pb2
from quartet.api.learner.v1 import learner_service_pb2 as pb
from quartet.types import RunSpec, TrainSamples, TrainStep, WeightManifest
from quartet.types.requests import (
    ExportModelRequest,
    ForwardRequest,
    LoadCheckpointRequest,
    SaveCheckpointRequest,
)
from quartet_learner.engine import LearnerEngine


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """One thing that all ranks do together."""

    encode: Callable[..., Sequence[Message]]
    """Arguments to messages, one an argument."""
    decode: tuple[Callable[[bytes], Any], ...]
    """Messages back to arguments."""
    run: Callable[..., Any]
    """(engine, *arguments) -> result."""


def _drain(engine: LearnerEngine, manifest: WeightManifest) -> None:
    """What other ranks do in a push: take part in every gather, and send nothing."""
    for _ in engine.buckets(manifest):
        continue


def _parsed(parse: Callable[[bytes], Any], decode: Callable[..., Any]) -> Callable[[bytes], Any]:
    return lambda data: decode(parse(data))


def _one(encode: Callable[[Any], Message]) -> Callable[[Any], list[Message]]:
    return lambda argument: [encode(argument)]


def _encode_train(step: TrainStep, samples: TrainSamples) -> list[Message]:
    return [codec.encode_train_step(step), codec.encode_train_samples(samples)]


def _encode_nothing() -> list[Message]:
    return []


def _start_run(engine: LearnerEngine, spec: RunSpec) -> Any:
    return engine.start_run(spec)


def _forward(engine: LearnerEngine, request: ForwardRequest) -> Any:
    return engine.forward(request)


def _save(engine: LearnerEngine, request: SaveCheckpointRequest) -> Any:
    return engine.save_checkpoint(request)


def _load(engine: LearnerEngine, request: LoadCheckpointRequest) -> Any:
    return engine.load_checkpoint(request)


def _export(engine: LearnerEngine, request: ExportModelRequest) -> Any:
    return engine.export_model(request)


COMMANDS: Mapping[str, Command] = {
    "start_run": Command(
        encode=_one(codec.encode_run_spec),
        decode=(_parsed(pb.StartRunRequest.FromString, codec.decode_run_spec),),
        run=_start_run,
    ),
    "train": Command(
        encode=_encode_train,
        decode=(
            _parsed(pb.TrainHeader.FromString, codec.decode_train_step),
            _parsed(pb.TrainSamples.FromString, codec.decode_train_samples),
        ),
        run=LearnerEngine.train,
    ),
    "forward": Command(
        encode=_one(codec.encode_forward_request),
        decode=(_parsed(pb.ForwardRequest.FromString, codec.decode_forward_request),),
        run=_forward,
    ),
    "save_checkpoint": Command(
        encode=_one(codec.encode_save_checkpoint_request),
        decode=(
            _parsed(pb.SaveCheckpointRequest.FromString, codec.decode_save_checkpoint_request),
        ),
        run=_save,
    ),
    "load_checkpoint": Command(
        encode=_one(codec.encode_load_checkpoint_request),
        decode=(
            _parsed(pb.LoadCheckpointRequest.FromString, codec.decode_load_checkpoint_request),
        ),
        run=_load,
    ),
    "export_model": Command(
        encode=_one(codec.encode_export_model_request),
        decode=(_parsed(pb.ExportModelRequest.FromString, codec.decode_export_model_request),),
        run=_export,
    ),
    "gather": Command(
        encode=_one(codec.encode_weight_manifest),
        decode=(_parsed(weights_pb2.WeightManifest.FromString, codec.decode_weight_manifest),),
        run=_drain,
    ),
    "sleep": Command(encode=_encode_nothing, decode=(), run=LearnerEngine.sleep),
    "wake": Command(encode=_encode_nothing, decode=(), run=LearnerEngine.wake),
}


def encode_arguments(name: str, arguments: Sequence[Any]) -> list[bytes]:
    """The arguments of a command, as bytes."""
    return [message.SerializeToString() for message in COMMANDS[name].encode(*arguments)]


def decode_arguments(name: str, messages: Sequence[bytes]) -> list[Any]:
    """The arguments of a command, from what `encode_arguments` made of them."""
    decoders = COMMANDS[name].decode
    return [decode(data) for decode, data in zip(decoders, messages, strict=True)]
