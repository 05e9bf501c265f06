from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

from quartet import config
from quartet.config.load import build
from quartet.config.machine import Machine
from quartet.config.runnable import obstacles, require_runnable
from quartet.config.support import REFUSED, unsupported
from quartet.config.tree import flat, leaves
from quartet.errors import ConfigError

CPU = Machine()
EIGHT = Machine(num_gpus=8, has_vllm=True, has_flash_attention=True)
TRAINERS = [config.PpoConfig, config.SftConfig, config.RmConfig, config.DpoConfig]
ALL = [
    *TRAINERS,
    config.RolloutServeConfig,
    config.RewardServeConfig,
    config.RefServeConfig,
    config.LearnerServeConfig,
]
REFUSALS = [(cls, name) for cls in ALL for name in leaves(cls) if name in REFUSED]


def found(cls: type, values: dict[str, object], machine: Machine = CPU) -> list[str]:
    return [error.info.field for error in obstacles(build(cls, values, {}), machine)]


def another(cls: type, name: str) -> object:
    """A value that is not the default."""
    leaf, default = leaves(cls)[name], flat(cls())[name]
    if leaf.is_bool:
        return not default
    if isinstance(default, int | float):
        return 7.0 if default == math.inf else default + 1
    if isinstance(default, tuple):
        return tuple(f"{v}x" if isinstance(v, str) else v + 1 for v in default)
    return "muon" if name.endswith("optim") else "something"


@pytest.mark.parametrize(("cls", "name"), REFUSALS, ids=[f"{c.__name__}-{n}" for c, n in REFUSALS])
def test_what_is_not_there_is_refused(cls: type, name: str):
    (error,) = unsupported(build(cls, {name: another(cls, name)}, {}))
    assert error.info.field == name
    assert error.info.remedy
    assert str(error).startswith(f"--{name}")


def test_every_refusal_is_of_some_command():
    assert set(REFUSED) == {name for _, name in REFUSALS}


@pytest.mark.parametrize("cls", ALL)
@pytest.mark.parametrize("machine", [CPU, Machine(num_gpus=64)])
def test_defaults_are_supported(cls: type, machine: Machine):
    assert found(cls, {}, machine) == []


def test_models(tmp_path: Path):
    name = "actor.model_name_or_path"
    (tmp_path / "model").mkdir()
    assert found(config.PpoConfig, {name: str(tmp_path / "gone")}) == [name]
    assert found(config.PpoConfig, {name: str(tmp_path / "model")}) == [name]
    (tmp_path / "model" / "config.json").write_text("{}")
    assert found(config.PpoConfig, {name: str(tmp_path / "model")}) == []
    assert found(config.PpoConfig, {name: "org/model"}) == []


@pytest.mark.parametrize(
    ("cls", "name"),
    [
        (config.PpoConfig, "actor.model_name_or_path"),
        (config.PpoConfig, "critic.model_name_or_path"),
        (config.PpoConfig, "reward.model_name_or_path"),
        (config.RmConfig, "model.model_name_or_path"),
        (config.DpoConfig, "ref.model_name_or_path"),
    ],
)
@pytest.mark.parametrize("nest", ["{}", '{{"text_config": {}}}'])
def test_models_of_fewer_positions_than_the_data(tmp_path: Path, cls: type, name: str, nest: str):
    text = nest.format('{"max_position_embeddings": 64}')
    (tmp_path / "config.json").write_text(text)
    assert found(cls, {name: str(tmp_path), "data.max_len": 65}) == ["data.max_len"]
    assert found(cls, {name: str(tmp_path), "data.max_len": 64}) == []


@pytest.mark.parametrize("text", ["{}", "[]", "{", '{"max_position_embeddings": null}'])
def test_models_that_say_no_length(tmp_path: Path, text: str):
    (tmp_path / "config.json").write_text(text)
    assert found(config.SftConfig, {"model.model_name_or_path": str(tmp_path)}) == []


@pytest.mark.parametrize(
    ("cls", "name"),
    [
        (config.SftConfig, "model.model_name_or_path"),
        (config.DpoConfig, "ref.model_name_or_path"),
        (config.PpoConfig, "critic.model_name_or_path"),
        (config.PpoConfig, "reward.model_name_or_path"),
        (config.RolloutServeConfig, "rollout.model_name_or_path"),
        (config.RefServeConfig, "ref.model_name_or_path"),
        (config.LearnerServeConfig, "learner.model_name_or_path"),
        (config.RewardServeConfig, "reward.model_name_or_path"),
        (config.SftConfig, "data.dataset"),
        (config.SftConfig, "eval.dataset"),
        (config.PpoConfig, "data.prompt_dataset"),
        (config.PpoConfig, "eval.dataset"),
    ],
)
def test_paths_of_nothing(cls: type, name: str):
    assert found(cls, {name: "./nowhere"}) == [name]


def test_datasets(tmp_path: Path):
    file = tmp_path / "a.jsonl"
    file.write_text("{}")
    name = "data.dataset"
    assert found(config.SftConfig, {name: f"{file},org/data"}) == []
    assert found(config.SftConfig, {name: f"{tmp_path}@part"}) == []
    assert found(config.SftConfig, {name: f"{file},gone.jsonl"}) == [name]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("def reward_func(queries, prompts, labels): ...", None),
        ("async def reward_func(queries, prompts, labels): ...", None),
        ("from elsewhere import reward_func", None),
        ("from elsewhere import *", None),
        ("from elsewhere import f as reward_func", None),
        ("reward_func = make()", None),
        ("try:\n    import x\nexcept ImportError:\n    def reward_func(): ...", None),
        ("def reward(queries): ...", "does not define reward_func"),
        ("class A:\n    def reward_func(self): ...", "does not define reward_func"),
        ("", "does not define reward_func"),
        ("def reward_func(:", "is no Python file"),
    ],
)
def test_reward_files(tmp_path: Path, text: str, problem: str | None):
    file = tmp_path / "reward.py"
    file.write_text(text)
    errors = list(obstacles(build(config.PpoConfig, {"reward.remote_url": str(file)}, {}), CPU))
    assert [error.info.field for error in errors] == (["reward.remote_url"] if problem else [])
    assert (problem or "") in "".join(map(str, errors))


def test_reward_file_that_is_gone():
    assert found(config.RewardServeConfig, {"reward.remote_url": "gone.py"}) == [
        "reward.remote_url"
    ]


def test_gpus():
    assert found(config.PpoConfig, {}, EIGHT) == ["actor.num_gpus_per_node"]
    assert found(config.SftConfig, {}, EIGHT) == []
    assert found(config.SftConfig, {"learner.num_ranks": 9}, EIGHT) == ["learner.num_ranks"]
    assert found(config.SftConfig, {"learner.num_ranks": 9}, CPU) == []
    assert found(config.LearnerServeConfig, {"learner.num_ranks": 9}, EIGHT) == [
        "learner.num_ranks"
    ]


def test_other_machines_need_addresses():
    values = {"actor.num_nodes": 2, "critic.num_nodes": 2}
    assert found(config.PpoConfig, values) == ["actor.num_nodes", "critic.num_nodes"]
    given = {"learner.address": "h:1", "critic.address": "h:2"}
    assert found(config.PpoConfig, values | given) == []


def test_engines():
    assert found(config.PpoConfig, {"vllm.tensor_parallel_size": 2}) == [
        "vllm.tensor_parallel_size"
    ]
    assert found(config.PpoConfig, {"rollout.engine": "vllm"}) == ["rollout.engine"]
    assert found(config.RolloutServeConfig, {"rollout.engine": "vllm"}) == ["rollout.engine"]
    assert found(config.RolloutServeConfig, {"vllm.tensor_parallel_size": 2}, EIGHT) == []
    assert found(config.RolloutServeConfig, {}, EIGHT) == []
    assert found(config.RolloutServeConfig, {"rollout.engine": "vllm"}, EIGHT) == []


def test_the_python_of_the_rollout_services():
    assert found(config.PpoConfig, {"rollout.python": "/no/python"}) == ["rollout.python"]
    assert found(config.PpoConfig, {"rollout.python": sys.executable}) == []
    without = {"rollout.python": sys.executable, "rollout.engine": "vllm"}
    [error] = obstacles(build(config.PpoConfig, without, {}), CPU)
    assert sys.executable in str(error)


def test_push_backends():
    several = {"train.colocate_all": True, "vllm.num_engines": 8}
    one = {"train.colocate_all": True, "vllm.num_engines": 1}
    for shared in (several, one):
        assert "push.backend" not in found(config.PpoConfig, shared, EIGHT)
        assert "push.backend" in found(config.PpoConfig, shared | {"push.backend": "nccl"}, EIGHT)
    ipc = {"push.backend": "ipc"}
    assert found(config.PpoConfig, ipc) == []
    assert "push.backend" in found(config.PpoConfig, ipc, EIGHT)
    assert "push.backend" in found(config.PpoConfig, several | ipc, EIGHT)
    assert "push.backend" not in found(config.PpoConfig, one | ipc, EIGHT)
    assert found(config.PpoConfig, {"push.backend": "nccl"}) == ["push.backend"]
    assert found(config.PpoConfig, {"push.backend": "gloo"}) == []


def test_half_precision_on_a_cpu():
    assert found(config.SftConfig, {"ds.param_dtype": "fp16"}) == ["ds.param_dtype"]
    assert found(config.SftConfig, {"ds.param_dtype": "fp16"}, EIGHT) == []


def test_weights_in_4_bits_need_a_gpu_and_bitsandbytes():
    wanted = {"ds.load_in_4bit": True, "ds.lora.rank": 8}
    ready = Machine(num_gpus=1, has_bitsandbytes=True)
    for machine in (CPU, EIGHT):
        assert found(config.SftConfig, wanted, machine) == ["ds.load_in_4bit"]
        assert found(config.LearnerServeConfig, wanted, machine) == ["ds.load_in_4bit"]
    assert found(config.SftConfig, wanted, ready) == []
    assert found(config.LearnerServeConfig, wanted, ready) == []
    assert found(config.SftConfig, wanted | {"learner.address": "localhost:1"}) == []


@pytest.mark.parametrize(
    "cls", [config.RefServeConfig, config.RewardServeConfig, config.RolloutServeConfig]
)
def test_services_that_train_nothing_refuse_4_bits(cls: type):
    ready = Machine(num_gpus=1, has_bitsandbytes=True)
    assert found(cls, {"ds.load_in_4bit": True}, ready) == ["ds.load_in_4bit"]


def test_require():
    with pytest.raises(ConfigError, match="use_ms"):
        require_runnable(build(config.SftConfig, {"use_ms": True}, {}), CPU)
    require_runnable(config.SftConfig(), CPU)
