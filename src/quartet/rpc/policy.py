"""Every port, limit, deadline and retry rule of Quartet's calls, in one place.

A new method gets a row in `_METHODS`; a test compares the rows with the contract.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

PORTS = {"rollout": 7001, "reward": 7002, "ref": 7003, "learner": 7004, "critic": 7005}
"""Ports that the documentation and the deployment files use. A service binds what it is told."""

MAX_MESSAGE_BYTES = 64 << 20
"""Largest message that either side sends or takes (gRPC's own default is 4 MiB to take)."""

CHUNK_BYTES = 512 << 10
"""Aim for one message of a stream: far cheaper than one large unary message."""

MAX_METADATA_BYTES = 32 << 10
"""Largest metadata of a call: gRPC's own 8 KiB is too small for an error with its details."""

CLIENT_CONCURRENCY = 64
"""Calls that one client keeps in flight. Thousands at once on one channel are lost as CANCELLED."""

KEEPALIVE_SECONDS = 30
"""A client asks whether the other side is there when a call has been silent for so long."""

KEEPALIVE_TIMEOUT_SECONDS = 15
"""No answer for so long: the connection is dead."""

CONNECT_SECONDS = 20
"""Longest time to open a connection, both sides' first words included: a busy machine is slow."""

REQUEST_ID_KEY = "quartet-request-id"
"""Metadata key that carries a call's request_id to the server's log."""

_MINUTE = 60.0
_HOUR = 3600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class MethodPolicy:
    """How one method is called."""

    deadline: float
    """Seconds a call may take when the caller does not say."""
    idempotent: bool
    """A repeat does no harm, so UNAVAILABLE is tried again."""
    control: bool = False
    """Short and never refused for lack of room: what frees room must get in."""


def _control(deadline: float, *, idempotent: bool = True) -> MethodPolicy:
    return MethodPolicy(deadline=deadline, idempotent=idempotent, control=True)


def _work(deadline: float, *, idempotent: bool = True) -> MethodPolicy:
    return MethodPolicy(deadline=deadline, idempotent=idempotent)


_METHODS: dict[str, dict[str, MethodPolicy]] = {
    "quartet.api.rollout.v1.RolloutService": {
        "GetInfo": _control(10),
        "Generate": _work(_HOUR),
        "PrepareWeights": _control(2 * _MINUTE),
        # What was received or swapped is not known after a lost call: the push is repeated.
        "ReceiveWeights": _control(30 * _MINUTE, idempotent=False),
        "CommitWeights": _control(2 * _MINUTE, idempotent=False),
        "AbortWeights": _control(30),
        "Sleep": _control(5 * _MINUTE),
        "Wake": _control(5 * _MINUTE),
        "Pause": _control(30 * _MINUTE),
        "Resume": _control(30),
    },
    "quartet.api.reward.v1.RewardService": {
        "GetInfo": _control(10),
        "Score": _work(30 * _MINUTE),
        "Sleep": _control(5 * _MINUTE),
        "Wake": _control(5 * _MINUTE),
    },
    "quartet.api.ref.v1.RefService": {
        "GetInfo": _control(10),
        "ComputeLogprobs": _work(_HOUR),
        "Sleep": _control(5 * _MINUTE),
        "Wake": _control(5 * _MINUTE),
    },
    "quartet.api.learner.v1.LearnerService": {
        # Ranks may be in a collective when it is asked.
        "GetInfo": _control(_MINUTE),
        "StartRun": _work(30 * _MINUTE),
        "Forward": _work(_HOUR),
        "Train": _work(2 * _HOUR),
        "SaveCheckpoint": _work(_HOUR),
        "LoadCheckpoint": _work(_HOUR),
        "ExportModel": _work(_HOUR),
        "PushWeights": _work(_HOUR),
        "Sleep": _control(5 * _MINUTE),
        "Wake": _control(5 * _MINUTE),
    },
}

_DEFAULT = _work(_MINUTE, idempotent=False)
ABOUT_THE_SERVER = ("grpc.health.", "grpc.reflection.")
"""Prefixes of the services that every server has beside its own."""


def services() -> dict[str, tuple[str, ...]]:
    """Full service names and the methods that have a row."""
    return {service: tuple(methods) for service, methods in _METHODS.items()}


def method_policy(service: str, method: str) -> MethodPolicy:
    """The row of a method; a method without one gets a minute and no retry."""
    return _METHODS.get(service, {}).get(method, _DEFAULT)


def takes_a_slot(service: str, method: str) -> bool:
    """True when a call counts against the server's max_concurrent_calls."""
    return not service.startswith(ABOUT_THE_SERVER) and not method_policy(service, method).control


def service_config(*, retry: bool = True, spread: bool = False) -> str:
    """The service config of a channel, as JSON.

    Args:
        retry: try UNAVAILABLE again, with backoff, for idempotent methods only. gRPC itself adds
            jitter and stops at 5 attempts. Hedging is left out: Python ignores it.
        spread: the address is a name for several servers: take turns among those that serve.
    """
    config: dict[str, object] = {}
    if spread:
        config["loadBalancingConfig"] = [{"round_robin": {}}]
        config["healthCheckConfig"] = {"serviceName": ""}
    if not retry:
        return json.dumps(config)
    names = [
        {"service": service, "method": method}
        for service, methods in _METHODS.items()
        for method, policy in methods.items()
        if policy.idempotent
    ]
    again = {
        "maxAttempts": 4,
        "initialBackoff": "0.1s",
        "maxBackoff": "2s",
        "backoffMultiplier": 3,
        "retryableStatusCodes": ["UNAVAILABLE"],
    }
    # A server that fails most calls is left alone until it recovers.
    config["retryThrottling"] = {"maxTokens": 100, "tokenRatio": 0.1}
    config["methodConfig"] = [{"name": names, "retryPolicy": again}]
    return json.dumps(config)


_COMMON_OPTIONS: tuple[tuple[str, int | str], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", 2 * MAX_METADATA_BYTES),
)


def server_options() -> tuple[tuple[str, int | str], ...]:
    """Options of every server."""
    return (
        *_COMMON_OPTIONS,
        # Without this a second server binds the same port and gets half of the calls.
        ("grpc.so_reuseport", 0),
        # Clients ask more often than the 5 minutes that a server allows by default.
        ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_SECONDS * 1000 // 2),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", KEEPALIVE_SECONDS * 1000 // 2),
    )


def channel_options(*, retry: bool, spread: bool) -> tuple[tuple[str, int | str], ...]:
    """Options of every channel; see `service_config` for the arguments."""
    return (
        *_COMMON_OPTIONS,
        ("grpc.service_config", service_config(retry=retry, spread=spread)),
        ("grpc.enable_retries", int(retry)),
        ("grpc.keepalive_time_ms", KEEPALIVE_SECONDS * 1000),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_SECONDS * 1000),
        # A replica that comes back is found within a second or two, not after two minutes.
        ("grpc.initial_reconnect_backoff_ms", 200),
        # No backoff in spite of its name: how long one try to connect may take.
        ("grpc.min_reconnect_backoff_ms", CONNECT_SECONDS * 1000),
        ("grpc.max_reconnect_backoff_ms", 2000),
        # Channels to the same address stay separate: each client counts and closes its own.
        ("grpc.use_local_subchannel_pool", 1),
    )
