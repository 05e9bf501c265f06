"""Closed sets of names, as strings in Python and as numbers on the wire.

A number without a name here (UNSPECIFIED, or one of a newer contract) is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, Literal, TypeVar, cast, get_args

from quartet import types
from quartet.api.common.v1 import sequence_pb2, weights_pb2
from quartet.api.learner.v1 import learner_service_pb2, loss_pb2
from quartet.api.rollout.v1 import rollout_service_pb2
from quartet.codec.check import invalid
from quartet.types.learner import Aggregation

Name = TypeVar("Name", bound=str)


class EnumCodec(Generic[Name]):
    """Turns the names of one set into the numbers of one proto enum and back.

    Args:
        enum: the generated enum.
        names: Python's name of each value, without UNSPECIFIED.
    """

    def __init__(self, enum: Any, names: Mapping[Name, str]) -> None:
        self._enum = enum
        self._numbers = {name: int(enum.Value(value)) for name, value in names.items()}
        self._names = {number: name for name, number in self._numbers.items()}

    def encode(self, name: Name, field: str = "") -> Any:
        """Number of `name`. Raises RequestError for a name outside the set."""
        number = self._numbers.get(name)
        if number is None:
            allowed = ", ".join(self._numbers)
            raise invalid(
                field or self._enum.DESCRIPTOR.name, name, f"is {name!r}", f"one of {allowed}"
            )
        return number

    def encode_or_unset(self, name: Name | None, field: str = "") -> Any:
        """As encode; None is UNSPECIFIED, where the contract gives that a meaning."""
        return 0 if name is None else self.encode(name, field)

    def decode(self, number: int, field: str = "") -> Name:
        """Name of `number`. Raises RequestError when there is none."""
        name = self._names.get(number)
        if name is None:
            allowed = ", ".join(self._enum.Name(known) for known in self._names)
            problem = "is not set" if number == 0 else f"has the unknown value {number}"
            raise invalid(field or self._enum.DESCRIPTOR.name, number, problem, f"one of {allowed}")
        return name

    def decode_or(self, number: int, default: Name, field: str = "") -> Name:
        """As decode, with the default that the contract documents for UNSPECIFIED."""
        return default if number == 0 else self.decode(number, field)


def _codec(enum: Any, names: type[Name] | tuple[str, ...], **special: str) -> EnumCodec[Name]:
    """Codec of an enum of PREFIX_NAME values; `special` says where NAME is not the name."""
    prefix = enum.Name(0).removesuffix("UNSPECIFIED")
    members = names if isinstance(names, tuple) else tuple(cast("Any", names))
    values = {name: prefix + special.get(name, name.upper().replace("-", "_")) for name in members}
    return EnumCodec(enum, cast("Mapping[Name, str]", values))


LOGPROB_KIND = _codec(sequence_pb2.LogprobKind, types.LogprobKind)
FINISH_REASON = _codec(sequence_pb2.FinishReason, types.FinishReason)
PUSH_BACKEND = _codec(weights_pb2.PushBackend, types.PushBackend)
REPLICA_STATE = _codec(rollout_service_pb2.ReplicaState, types.ReplicaState)
PAUSE_MODE = _codec(rollout_service_pb2.PauseMode, types.PauseMode)
HEAD = _codec(learner_service_pb2.Head, types.Head)
FORWARD_OUTPUT = _codec(learner_service_pb2.ForwardOutput, types.ForwardOutput)

LOSS_AGGREGATION: EnumCodec[Aggregation] = _codec(loss_pb2.LossAggregation, get_args(Aggregation))
POLICY_LOSS_TYPE: EnumCodec[Literal["ppo", "gspo", "cispo"]] = _codec(
    loss_pb2.PolicyLossType, ("ppo", "gspo", "cispo")
)
KL_ESTIMATOR: EnumCodec[Literal["k1", "k2", "k3"]] = _codec(
    loss_pb2.KlEstimator, ("k1", "k2", "k3")
)
CORRECTION_LEVEL: EnumCodec[Literal["token", "seq"]] = _codec(
    loss_pb2.CorrectionLevel, ("token", "seq"), seq="SEQUENCE"
)
CORRECTION_MODE: EnumCodec[Literal["mask", "clip"]] = _codec(
    loss_pb2.CorrectionMode, ("mask", "clip")
)
CORRECTION_GATING: EnumCodec[Literal["ratio", "binary_kl", "tv"]] = _codec(
    loss_pb2.CorrectionGating, ("ratio", "binary_kl", "tv")
)
PAIRWISE_LOSS_TYPE: EnumCodec[Literal["sigmoid", "logexp"]] = _codec(
    loss_pb2.PairwiseLossType, ("sigmoid", "logexp")
)
OPTIMIZER_TYPE: EnumCodec[Literal["adam", "muon"]] = _codec(
    learner_service_pb2.OptimizerType, ("adam", "muon")
)
