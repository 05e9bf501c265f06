from __future__ import annotations

from pathlib import Path

import pytest

from quartet.config import PpoConfig, RewardServeConfig, RolloutServeConfig, SftConfig
from quartet.config.load import from_yaml, load
from quartet.errors import ConfigError


def ppo(*args: str, **environ: str) -> PpoConfig:
    return load(PpoConfig, args, environ=environ).config


def refused(*args: str, cls: type = PpoConfig, environ: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load(cls, args, environ=environ or {})
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_later_wins(tmp_path: Path):
    first, second = tmp_path / "a.yaml", tmp_path / "b.yaml"
    first.write_text("actor: {adam: {lr: 1e-1, eps: 1e-1}, eps_clip: 0.1, dual_clip: 3}\n")
    second.write_text("actor: {adam: {lr: 2e-2, eps: 2e-2}, eps_clip: 0.2}\n")
    loaded = load(
        PpoConfig,
        ["--config", str(first), f"--config={second}", "--actor.adam.lr", "4e-4"],
        environ={"QUARTET_ACTOR__ADAM__LR": "3e-3", "QUARTET_ACTOR__ADAM__EPS": "3e-3"},
    )
    actor = loaded.config.actor
    assert (actor.adam.lr, actor.adam.eps, actor.eps_clip) == (4e-4, 3e-3, 0.2)
    assert actor.dual_clip == 3  # the first file's, for the second is laid over it
    assert actor.adam.betas == (0.9, 0.95)
    assert loaded.origins == {
        "actor.adam.lr": "--actor.adam.lr",
        "actor.adam.eps": "QUARTET_ACTOR__ADAM__EPS",
        "actor.eps_clip": str(second),
        "actor.dual_clip": str(first),
    }


def test_a_flag_wins_wherever_the_file_stands(tmp_path: Path):
    file = tmp_path / "a.yaml"
    file.write_text("train: {batch_size: 7}")
    config = ppo("--train.batch_size", "9", "--config", str(file))
    assert config.train.batch_size == 9


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--train.batch_size", "3"], 3),
        (["--train.batch_size=3"], 3),
        (["--train.batch-size", "3"], 3),
        (["--train.batch_size", "2", "--train.batch_size", "3"], 3),
    ],
)
def test_spellings_of_a_flag(args: list[str], expected: int):
    assert ppo(*args).train.batch_size == expected


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--train.colocate_all"], True),
        (["--train.colocate_all", "--train.no_colocate_all"], False),
        (["--train.no_colocate_all"], False),
        (["--train.colocate_all=true"], True),
        (["--train.colocate_all=false"], False),
    ],
)
def test_flags_without_a_value(args: list[str], expected: bool):
    assert ppo(*args).train.colocate_all is expected


def test_a_flag_turns_off_what_a_file_turned_on(tmp_path: Path):
    file = tmp_path / "a.yaml"
    file.write_text("train: {colocate_all: true}")
    assert ppo("--config", str(file)).train.colocate_all
    assert not ppo("--config", str(file), "--train.no_colocate_all").train.colocate_all


def test_several_values_and_negative_ones():
    config = ppo(
        *("--actor.eps_clip_low_high", "0.2", "0.28"),
        *("--reward.clip_range=-5", "-1e-3"),
        *("--algo.advantage.is_correction_threshold", "0.1"),
        *("--ds.lora.target_modules", "q_proj", "v_proj"),
    )
    assert config.actor.eps_clip_low_high == (0.2, 0.28)
    assert config.reward.clip_range == (-5.0, -1e-3)
    assert config.algo.advantage.is_correction_threshold == (0.1,)
    assert config.ds.lora.target_modules == ("q_proj", "v_proj")


def test_the_seeds_spelling_of_the_estimator(tmp_path: Path):
    assert ppo("--algo.advantage_estimator", "rloo").algo.advantage.estimator == "rloo"
    assert ppo("--algo.advantage_estimator=rloo").algo.advantage.estimator == "rloo"
    assert ppo(QUARTET_ALGO__ADVANTAGE_ESTIMATOR="rloo").algo.advantage.estimator == "rloo"
    config = from_yaml(PpoConfig, "algo: {advantage_estimator: rloo}")
    assert config.algo.advantage.estimator == "rloo"


def test_host_and_port_of_a_service():
    args = ["--port", "7001", "--host", "127.0.0.2"]
    config = load(RolloutServeConfig, args, environ={}).config
    assert (config.rpc.port, config.rpc.host) == (7001, "127.0.0.2")
    assert "no such flag" in refused("--port", "1")  # a trainer listens nowhere


def test_serve_rms_line():
    line = (
        "--reward.model_name_or_path org/rm --reward.normalize_enable --port 5000 "
        "--ds.param_dtype bf16 --ds.packing_samples --data.max_len 8192 --batch_size 16"
    )
    config = load(RewardServeConfig, line.split(), environ={}).config
    assert config.rpc.port == 5000
    assert config.rpc.host == "127.0.0.1"
    assert config.batch_size == 16
    assert config.data.max_len == 8192


@pytest.mark.parametrize(
    ("flag", "hint"),
    [
        ("--rollout.temp", "did you mean --rollout.temperature?"),  # no abbreviations
        ("--train.batchsize", "did you mean --train.batch_size?"),
        ("--actor.lr", "did you mean --actor.adam.lr?"),
        ("--batch_size", "did you mean --rollout.batch_size?"),
        ("--remote_rm_url", "write --reward.remote_url"),
        ("--generate_max_len", "write --rollout.max_new_tokens"),
        ("--algo.advantage.is_correction_type", "tis is"),
        ("--qqq.zzz", "see --help for the flags"),
    ],
)
def test_unknown_flags(flag: str, hint: str):
    message = refused(flag, "1")
    assert f"{flag}: there is no such flag" in message
    assert hint in message


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--train.batch_size", "many"], ["--train.batch_size", "'many'", "expected int"]),
        (["--train.batch_size", "1.5"], ["--train.batch_size", "expected int"]),
        (["--train.batch_size"], ["Missing value", "--train.batch_size"]),
        (["--reward.clip_range", "1"], ["--reward.clip_range", "2 values"]),
        (["--algo.kl.estimator", "k9"], ["k9", "k1", "k2", "k3"]),
        (["--train.colocate_all", "True"], ["takes no value", "--train.no_colocate_all"]),
        (["--train.colocate_all=maybe"], ["takes no value"]),
        (["--train.no_colocate_all=true"], ["takes no value"]),
        (["stray"], ["stray"]),
        (["--config"], ["--config", "missing"]),
        (["--config", "/nowhere.yaml"], ["/nowhere.yaml", "No such file"]),
    ],
)
def test_wrong_values_are_one_line(args: list[str], words: list[str]):
    message = refused(*args)
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("variable", "text", "name", "value"),
    [
        ("QUARTET_ACTOR__ADAM__LR", "5e-7", "actor.adam.lr", 5e-7),
        ("QUARTET_TRAIN__COLOCATE_ALL", "true", "train.colocate_all", True),
        ("QUARTET_ACTOR__EPS_CLIP_LOW_HIGH", "0.2 0.28", "actor.eps_clip_low_high", (0.2, 0.28)),
        ("QUARTET_ACTOR__EPS_CLIP_LOW_HIGH", "0.2,0.28", "actor.eps_clip_low_high", (0.2, 0.28)),
        ("QUARTET_ACTOR__EPS_CLIP_LOW_HIGH", "[1, 2]", "actor.eps_clip_low_high", (1.0, 2.0)),
        ("QUARTET_DS__LORA__TARGET_MODULES", "a b", "ds.lora.target_modules", ("a", "b")),
        ("QUARTET_REWARD__REMOTE_URL", "5e-7", "reward.remote_url", "5e-7"),
        ("QUARTET_RUN__NAME", "0123", "run.name", "0123"),
        ("QUARTET_ACTOR__DUAL_CLIP", "None", "actor.dual_clip", None),
        ("QUARTET_USE_MS", "true", "use_ms", True),
    ],
)
def test_environment(variable: str, text: str, name: str, value: object):
    from quartet.config.tree import value_of

    assert value_of(ppo(**{variable: text}), name) == value


def test_environment_words_that_yaml_1_1_would_read_otherwise():
    config = ppo(QUARTET_ALGO__ADVANTAGE__IS_CORRECTION_LEVEL="off")
    assert config.algo.advantage.is_correction_level == "off"


def test_environment_of_nobody():
    message = refused(environ={"QUARTET_ACTOR__ADAM__LRR": "1"})
    assert "QUARTET_ACTOR__ADAM__LRR" in message
    assert "did you mean QUARTET_ACTOR__ADAM__LR?" in message


def test_environment_of_other_commands_is_left_alone():
    environ = {
        "QUARTET_ROLLOUT__MODEL_NAME_OR_PATH": "x",
        "QUARTET_LOG_FORMAT": "json",
        "HOME": "/",
    }
    loaded = load(PpoConfig, [], environ=environ, known_elsewhere=[RolloutServeConfig])
    assert loaded.origins == {}


def test_environment_of_the_wrong_type_names_the_variable():
    message = refused(environ={"QUARTET_TRAIN__BATCH_SIZE": "many"})
    assert "QUARTET_TRAIN__BATCH_SIZE" in message
    assert "expected int" in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("actor:\n  adam:\n    lrr: 1\n", ["actor.adam.lrr", "did you mean actor.adam.lr?"]),
        ("actr: {adam: {lr: 1}}", ["actr", "did you mean actor?"]),
        ("train: {batch_size: many}", ["train.batch_size", "'many'", "expected int"]),
        ("algo: {kl: {estimator: k9}}", ["algo.kl.estimator", "k9", "k1,k2,k3"]),
        ("actor: {eps_clip_low_high: [0.1]}", ["actor.eps_clip_low_high", "float x2"]),
        ("train: 3", ["train is a section"]),
        ("- 1", ["expected sections", "list"]),
        ("train: {seed: 1, seed: 2}", ["seed comes twice"]),
        ("train: {seed: 1", ["file.yaml:1"]),
        ("actor.adam.lrr: 1", ["actor.adam.lrr", "did you mean actor.adam.lr?"]),
    ],
)
def test_files_with_mistakes_name_file_and_key(tmp_path: Path, text: str, words: list[str]):
    file = tmp_path / "file.yaml"
    file.write_text(text)
    message = refused("--config", str(file))
    assert "file.yaml" in message
    for word in words:
        assert word in message


def test_files_take_dotted_keys_and_empty_sections(tmp_path: Path):
    file = tmp_path / "file.yaml"
    file.write_text("actor.adam.lr: 5e-7\ntrain:\nalgo.kl: {estimator: k3}\n")
    config = ppo("--config", str(file))
    assert config.actor.adam.lr == 5e-7
    assert config.algo.kl.estimator == "k3"


def test_an_empty_file_changes_nothing(tmp_path: Path):
    file = tmp_path / "file.yaml"
    file.write_text("# nothing\n")
    assert load(SftConfig, ["--config", str(file)], environ={}).config.adam.lr == 5e-6
