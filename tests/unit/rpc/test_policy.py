"""The table of methods against the contract, and addresses."""

from __future__ import annotations

import json

import pytest

from quartet.api.learner.v1 import learner_service_pb2
from quartet.api.ref.v1 import ref_service_pb2
from quartet.api.reward.v1 import reward_service_pb2
from quartet.api.rollout.v1 import rollout_service_pb2
from quartet.config.rpc import RpcConfig
from quartet.errors import ConfigError
from quartet.rpc import policy
from quartet.rpc.address import is_local_address, split_addresses
from quartet.rpc.channel import create_channel

FILES = [rollout_service_pb2, reward_service_pb2, ref_service_pb2, learner_service_pb2]


def test_every_method_has_a_row_and_no_row_is_left_over() -> None:
    contract = {
        service.full_name: tuple(sorted(method.name for method in service.methods))
        for file in FILES
        for service in file.DESCRIPTOR.services_by_name.values()
    }
    table = {name: tuple(sorted(methods)) for name, methods in policy.services().items()}
    assert table == contract


def test_only_idempotent_methods_are_tried_again_and_only_on_unavailable() -> None:
    (rule,) = json.loads(policy.service_config())["methodConfig"]
    assert rule["retryPolicy"]["retryableStatusCodes"] == ["UNAVAILABLE"]
    named = {(name["service"], name["method"]) for name in rule["name"]}
    for service, methods in policy.services().items():
        for method in methods:
            wanted = policy.method_policy(service, method).idempotent
            assert ((service, method) in named) == wanted
    rollout = "quartet.api.rollout.v1.RolloutService"
    assert (rollout, "Generate") in named
    assert (rollout, "CommitWeights") not in named


def test_what_frees_room_is_never_refused_for_lack_of_room() -> None:
    rollout = "quartet.api.rollout.v1.RolloutService"
    assert policy.takes_a_slot(rollout, "Generate")
    assert not policy.takes_a_slot(rollout, "AbortWeights")
    assert not policy.takes_a_slot("grpc.health.v1.Health", "Check")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("h1:1", ("h1:1",)),
        ("h1:1, h2:2,", ("h1:1", "h2:2")),
        ("unix:/tmp/a.sock,[::1]:5", ("unix:/tmp/a.sock", "[::1]:5")),
        ("dns:///rollout:7001", ("dns:///rollout:7001",)),
    ],
)
def test_addresses(text: str, expected: tuple[str, ...]) -> None:
    assert split_addresses(text) == expected


@pytest.mark.parametrize(
    "text", ["", ",", "host", "host:", ":1", "host:x", "host:0", "host:70000", "::1:5", "unix:"]
)
def test_no_address(text: str) -> None:
    with pytest.raises(ConfigError, match="address"):
        split_addresses(text)


def test_an_address_twice() -> None:
    with pytest.raises(ConfigError, match="twice"):
        split_addresses("a:1,a:1")


@pytest.mark.parametrize(
    ("address", "local"),
    [
        ("127.0.0.1:1", True),
        ("localhost:1", True),
        ("[::1]:1", True),
        ("unix:/x", True),
        ("dns:///localhost:1", True),
        ("10.0.0.1:1", False),
        ("dns:///rollout:1", False),
        ("0.0.0.0:1", False),
    ],
)
async def test_plain_text_leaves_the_machine_only_when_asked(address: str, local: bool) -> None:
    assert is_local_address(address) == local
    if not local:
        with pytest.raises(ConfigError, match="another machine"):
            create_channel(address)
    await create_channel(address, RpcConfig(insecure=True)).close()


@pytest.mark.parametrize(
    ("field", "settings"),
    [
        ("rpc.port", {"port": 70000}),
        ("rpc.max_concurrent_calls", {"max_concurrent_calls": 0}),
        ("rpc.drain_seconds", {"drain_seconds": -1.0}),
        ("rpc.drain_seconds", {"drain_seconds": float("nan")}),
        ("rpc.ready_file", {"ready_file": "/nowhere/at/all/ready"}),
        ("rpc.host", {"host": "0.0.0.0"}),
        ("rpc.host", {"host": "some.name"}),
    ],
)
def test_settings_that_cannot_be_served(field: str, settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as caught:
        RpcConfig(**settings).check()  # pyright: ignore[reportArgumentType]
    assert caught.value.info.field == field
    assert caught.value.info.remedy


def test_settings_that_can_be_served() -> None:
    RpcConfig(host="unix:/tmp/x.sock").check()
    RpcConfig(host="0.0.0.0", insecure=True).check()
