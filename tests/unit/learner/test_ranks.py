"""How a process becomes a rank, and how commands travel."""

from __future__ import annotations

import numpy as np
import pytest
from quartet_learner.commands import COMMANDS, decode_arguments, encode_arguments
from quartet_learner.ranks import launch_of, pack, rank_by_launcher, unpack
from quartet_learner.settings import LearnerSettings

from quartet.errors import ConfigError
from quartet.types import (
    OptimizerConfig,
    PolicyLoss,
    RunSpec,
    ScheduleConfig,
    TensorSpec,
    WeightManifest,
)
from quartet.types.requests import (
    ExportModelRequest,
    ForwardRequest,
    LoadCheckpointRequest,
    SaveCheckpointRequest,
)

from .steps import make_samples, make_sequences, step_of

SETTINGS = LearnerSettings(model_name_or_path="x")
ARGUMENTS = {
    "start_run": (
        RunSpec(run_id="r", optimizer=OptimizerConfig(), schedule=ScheduleConfig(), seed=3),
    ),
    "train": (step_of(PolicyLoss(dual_clip=3.0)), make_samples()),
    "forward": (ForwardRequest(chunk_id="c", sequences=make_sequences(), temperature=0.5),),
    "save_checkpoint": (
        SaveCheckpointRequest(request_id="a", folder="f", tag="t", trainer_state=b"\x00"),
    ),
    "load_checkpoint": (LoadCheckpointRequest(request_id="a", folder="f", tag="t"),),
    "export_model": (ExportModelRequest(request_id="a", folder="f", config_values={"mean": 1.5}),),
    "gather": (
        WeightManifest(
            tensors=(TensorSpec(name="a", dtype="float32", shape=(2, 3)),),
            bucket_bytes=16,
            aliases={"b": "a"},
        ),
    ),
    "sleep": (),
    "wake": (),
}


@pytest.fixture
def no_launcher(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_messages_of_any_size_stay_apart():
    messages = [b"", b"a", b"\x00" * 1000, b""]
    assert unpack(pack(messages)) == messages
    assert unpack(pack([])) == []


def same(one, other) -> bool:
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if hasattr(one, "__dataclass_fields__"):
        return type(one) is type(other) and all(
            same(getattr(one, name), getattr(other, name)) for name in one.__dataclass_fields__
        )
    return one == other


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_reaches_other_ranks_unchanged(name):
    arguments = ARGUMENTS[name]
    received = decode_arguments(name, unpack(pack(encode_arguments(name, arguments))))
    assert len(received) == len(arguments)
    for got, given in zip(received, arguments, strict=True):
        assert same(got, given)


def test_a_process_alone_is_the_only_rank(no_launcher):
    launch = launch_of(SETTINGS)
    assert (launch.rank, launch.world_size, launch.launched) == (0, 1, False)
    assert rank_by_launcher() == 0


def test_a_launcher_decides(no_launcher):
    values = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
    for name, value in values.items():
        no_launcher.setenv(name, value)
    launch = launch_of(SETTINGS)
    assert (launch.rank, launch.world_size, launch.launched) == (1, 4, True)
    assert rank_by_launcher() == 1
    with pytest.raises(ConfigError, match="the launcher started 4"):
        launch_of(LearnerSettings(model_name_or_path="x", num_ranks=2))
