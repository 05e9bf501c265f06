from __future__ import annotations

import dataclasses
import math

import pytest

from quartet.config import (
    DpoConfig,
    LearnerServeConfig,
    LoggerConfig,
    PpoConfig,
    RefServeConfig,
    RewardServeConfig,
    RmConfig,
    RolloutServeConfig,
    RunConfig,
    SftConfig,
    WandbConfig,
)
from quartet.config.files import parse_scalar, to_yaml
from quartet.config.load import from_yaml

ALL = [
    PpoConfig,
    SftConfig,
    RmConfig,
    DpoConfig,
    RolloutServeConfig,
    RewardServeConfig,
    RefServeConfig,
    LearnerServeConfig,
]


@pytest.mark.parametrize("cls", ALL)
def test_round_trip(cls: type):
    config = cls()
    assert from_yaml(cls, to_yaml(config)) == config


@pytest.mark.parametrize(
    "name",
    ["5e-7", "off", "no", "12:30", "007", "null", "", "ä", "a: b", "1_000", "-", "=", "x\ny"],
)
def test_words_stay_words(name: str):
    config = PpoConfig(run=RunConfig(name=name))
    assert from_yaml(PpoConfig, to_yaml(config)).run.name == name


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5e-7", 5e-7),
        ("1.", 1.0),
        (".5", 0.5),
        ("-1E3", -1000.0),
        (".inf", math.inf),
        ("-.inf", -math.inf),
        ("10", 10),
        ("010", 10),
        ("true", True),
        ("off", "off"),
        ("yes", "yes"),
        ("12:30", "12:30"),
        ("1_000", "1_000"),
        ("null", None),
        ("~", None),
        ("", None),
        ("[1, 2e0]", [1, 2.0]),
    ],
)
def test_yaml_1_2(text: str, value: object):
    found = parse_scalar(text)
    assert found == value
    assert type(found) is type(value)


def test_secrets_are_left_out():
    secret = "0123-the-key"
    config = PpoConfig(logger=LoggerConfig(wandb=WandbConfig(key=secret)))
    assert secret not in to_yaml(config)
    assert secret not in repr(config)
    assert from_yaml(PpoConfig, to_yaml(config)).logger.wandb.key is None


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        PpoConfig().train.seed = 1  # type: ignore[misc]
