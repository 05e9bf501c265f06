"""What is found wrong before a service is started, each as one line that names the flag."""

import json
from dataclasses import replace

import pytest

from quartet.config import CkptConfig, LearnerConfig, PpoCkptConfig, RunConfig, SftConfig
from quartet.errors import ConfigError
from quartet.trainer.preflight import check_models, check_outputs, models_on_hub
from quartet.trainer.run import Job, conduct
from tests.unit.trainer.players import ppo_config

GAE = {"advantage": {"estimator": "gae"}, "kl": {"init_coef": 0.01}}
NAMES = {
    "actor": {"model_name_or_path": "org/policy"},
    "critic": {"model_name_or_path": "org/critic"},
    "reward": {"model_name_or_path": "nope2", "remote_url": None},
    "algo": GAE,
}


@pytest.fixture
def offline(monkeypatch, tmp_path):
    """A machine without a network and with nothing in the cache."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))


def flags(config):
    return [flag.partition(".")[0] for flag, _ in models_on_hub(config)]


def test_models_of_services_that_are_started_here():
    assert flags(ppo_config(**NAMES)) == ["actor", "critic", "reward"]
    here = {role: NAMES[role] | {"address": "h:1"} for role in ("critic", "reward")}
    assert flags(ppo_config(**NAMES | here)) == ["actor"]
    elsewhere = {role: {"address": "h:1"} for role in ("learner", "rollout", "ref")}
    assert flags(ppo_config(**NAMES | here | elsewhere)) == []
    no_critic = {"advantage": {"estimator": "reinforce"}}
    assert flags(ppo_config(**NAMES | {"algo": no_critic})) == ["actor", "reward"]


@pytest.mark.parametrize("role", ["critic", "reward"])
def test_a_model_that_is_nowhere(offline, tmp_path, role):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    there = {name: NAMES[name] | {"model_name_or_path": str(tmp_path / "model")} for name in NAMES}
    config = ppo_config(**there | {"algo": GAE, role: {"model_name_or_path": "nope2"}})
    with pytest.raises(ConfigError, match=f"--{role}.model_name_or_path nope2: is no folder") as e:
        check_models(config)
    assert "\n" not in str(e.value)


def test_a_model_of_the_hub_that_is_too_short(monkeypatch, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 64}))
    cached = str(tmp_path / "config.json")
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: cached)
    with pytest.raises(ConfigError, match=r"--data\.max_len 65: .* takes 64 tokens"):
        check_models(ppo_config(**NAMES, data={"max_len": 65}))


def sft(**ckpt):
    return replace(SftConfig(), ckpt=replace(CkptConfig(), **ckpt))


def test_outputs_leave_no_trace(tmp_path):
    config = sft(output_dir=str(tmp_path / "a/b"), path=str(tmp_path / "c"), save_steps=1)
    check_outputs(config)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "a/b").mkdir(parents=True)
    check_outputs(config)
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["b"]


@pytest.mark.parametrize("name", ["output_dir", "path"])
def test_outputs_that_cannot_be_written(tmp_path, name):
    (tmp_path / "file").write_text("")
    good = {"output_dir": str(tmp_path / "a"), "path": str(tmp_path / "b"), "save_steps": 1}
    for bad in ("/proc/none", str(tmp_path / "file"), str(tmp_path / "file/below")):
        config = sft(**good | {name: bad})
        with pytest.raises(ConfigError, match=f"--ckpt.{name} {bad}: cannot be written"):
            check_outputs(config)
        # The service at an address writes on its own machine.
        check_outputs(replace(config, learner=LearnerConfig(address="h:1")))


def test_checkpoints_that_are_not_written_need_no_folder(tmp_path):
    check_outputs(sft(output_dir=str(tmp_path / "a"), path="/proc/none"))
    ckpt = replace(PpoCkptConfig(), output_dir=str(tmp_path / "a"), path="/proc/none")
    with pytest.raises(ConfigError, match=r"ckpt\.path"):
        check_outputs(replace(ppo_config(eval={"steps": 1}), ckpt=ckpt))


def test_a_run_folder_that_cannot_be_made(tmp_path, capsys):
    config = replace(sft(output_dir=str(tmp_path / "a")), run=RunConfig(dir="/proc/foo", name="r"))

    async def body(run):
        raise AssertionError("nothing may begin")

    assert conduct(config, lambda progress: Job(services=[], body=body)) == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("error: --run.dir /proc/foo: the run's folder /proc/foo/r cannot be")
