"""`--reward.parts`: what can be said, and what is said about what cannot."""

from dataclasses import replace

import pytest

from quartet.config import PpoConfig
from quartet.config.machine import Machine
from quartet.config.placement import places
from quartet.config.rewardparts import check_parts, parse_parts
from quartet.config.runnable import obstacles
from quartet.config.validate import problems
from quartet.errors import ConfigError

CPU = Machine(num_gpus=0)


def test_every_kind_of_source():
    parts = parse_parts(
        ["0.8:math", "0.2:a/format.py", "-1:model:org/rm", "1:http://host:5000/get_reward"]
    )
    assert [(p.weight, p.kind, p.target, p.name) for p in parts] == [
        (0.8, "math", "", "math"),
        (0.2, "function", "a/format.py", "format"),
        (-1.0, "model", "org/rm", "rm"),
        (1.0, "http", "http://host:5000/get_reward", "host"),
    ]


def test_parts_of_one_name_are_told_apart():
    parts = parse_parts(["1:a/check.py", "1:b/check.py", "1:c/check.py"])
    assert [part.name for part in parts] == ["check", "check_2", "check_3"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("math", "is not WEIGHT:SOURCE"),
        ("x:math", "is not WEIGHT:SOURCE"),
        ("nan:math", "is not WEIGHT:SOURCE"),
        ("1:", "is not WEIGHT:SOURCE"),
        ("1:model:", "is no source"),
        ("1:maths", "is no source"),
    ],
)
def test_what_cannot_be_read_is_named(text, words):
    (error,) = check_parts([text])
    assert words in str(error)
    assert error.info.field == "reward.parts"
    with pytest.raises(ConfigError, match=words):
        parse_parts([text])


def test_a_sum_of_nothing_is_refused():
    (error,) = check_parts(["0:math", "0:f.py"])
    assert "all weights are 0" in str(error)


def ppo(**reward):
    config = PpoConfig()
    return replace(config, reward=replace(config.reward, **reward))


def fields(found):
    return [error.info.field for error in found]


def test_a_sum_is_the_only_source():
    both = ppo(parts=("1:math",), remote_url="f.py")
    assert "reward.parts" in fields(problems(both))
    assert "reward.parts" not in fields(problems(ppo(parts=("1:math",))))


def test_files_and_models_of_a_sum_must_be_there(tmp_path):
    empty = tmp_path / "empty.py"
    empty.write_text("x = 1\n")
    config = ppo(parts=(f"1:{empty}", f"1:model:{tmp_path / 'no'}"))
    said = [str(e) for e in obstacles(config, CPU) if e.info.field == "reward.parts"]
    assert any("does not define reward_func" in line for line in said)
    assert any(str(tmp_path / "no") in line for line in said)


def test_only_a_sum_with_a_model_needs_a_gpu():
    def gpus(config):
        return [
            place.gpus for place in places(config, Machine(num_gpus=8)) if place.role == "reward"
        ]

    small = ppo(num_gpus_per_node=1)
    sized = replace(small.reward, parts=("1:math",))
    assert gpus(replace(small, reward=sized)) == [()]
    with_model = replace(small.reward, parts=("1:math", "1:model:org/rm"))
    ((gpu,),) = gpus(replace(small, reward=with_model))
    assert isinstance(gpu, int)
