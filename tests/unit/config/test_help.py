from __future__ import annotations

import re

import pytest

from quartet.config import (
    PpoConfig,
    RefServeConfig,
    RewardServeConfig,
    RolloutServeConfig,
    SftConfig,
)
from quartet.config.help import docstring, help_text, shown_default
from quartet.config.support import REFUSED
from quartet.config.tree import leaves


def test_every_flag_with_type_default_and_meaning():
    text = help_text(PpoConfig, "quartet train ppo")
    for name in leaves(PpoConfig):
        assert f"--{name}" in text
    assert "--actor.optim str {adam,muon}" in text
    assert "--actor.adam.betas float x2" in text
    assert "(default: 0.9 0.95)" in text


def test_a_field_of_a_parent_has_its_docstring():
    assert docstring(leaves(PpoConfig)["actor.max_norm"]).startswith("Gradient norm")
    assert docstring(leaves(PpoConfig)["critic.adam.lr"]) == "Peak learning rate."


def test_an_overridden_field_has_its_own():
    assert "0 tokenizes" not in docstring(leaves(PpoConfig)["data.max_samples"])
    assert docstring(leaves(PpoConfig)["data.max_samples"]).startswith("Most prompts")


def test_refused_flags_say_so():
    text = " ".join(help_text(PpoConfig, "quartet train ppo").split())
    assert "Not in this release: download the model first and give its folder." in text


@pytest.mark.parametrize(
    "cls", [PpoConfig, SftConfig, RewardServeConfig, RolloutServeConfig, RefServeConfig]
)
def test_the_examples_at_the_top_are_flags_that_work(cls: type):
    head = " ".join(help_text(cls, "quartet x").partition(":\n  --")[0].split())
    setting = re.search(r"such as QUARTET_(\w+)\.", head)
    switch = re.search(r"turns them off: --([\w.]*?)no_(\w+)", head)
    assert setting
    assert switch
    shown = {setting[1].replace("__", ".").lower(), switch[1] + switch[2]}
    assert shown <= set(leaves(cls)) - set(REFUSED)


def test_other_spellings():
    assert "--rpc.port, --port int" in help_text(RewardServeConfig, "quartet serve reward")
    assert "--algo.advantage_estimator" in help_text(PpoConfig, "quartet train ppo")


def test_defaults_as_typed():
    assert shown_default((0.9, 0.95)) == "0.9 0.95"
    assert shown_default("") == "''"
    assert shown_default("User: {}\n") == r"'User: {}\n'"
    assert shown_default(None) == "None"
