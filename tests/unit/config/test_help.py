from __future__ import annotations

from quartet.config import PpoConfig, RewardServeConfig
from quartet.config.help import docstring, help_text, shown_default
from quartet.config.tree import leaves


def test_every_flag_with_type_default_and_meaning():
    text = help_text(PpoConfig, "quartet train ppo")
    for name in leaves(PpoConfig):
        assert f"--{name}" in text
    assert "--actor.optim str {adam,muon}" in text
    assert "--actor.adam.betas float x2" in text
    assert "(default: 0.9 0.95)" in text
    assert "QUARTET_ACTOR__OPTIM" in text


def test_a_field_of_a_parent_has_its_docstring():
    assert docstring(leaves(PpoConfig)["actor.max_norm"]).startswith("Gradient norm")
    assert docstring(leaves(PpoConfig)["critic.adam.lr"]) == "Peak learning rate."


def test_an_overridden_field_has_its_own():
    assert "0 tokenizes" not in docstring(leaves(PpoConfig)["data.max_samples"])
    assert docstring(leaves(PpoConfig)["data.max_samples"]).startswith("Most prompts")


def test_refused_flags_say_so():
    text = " ".join(help_text(PpoConfig, "quartet train ppo").split())
    assert "Not in this release: leave the flag away; groups are scored" in text


def test_other_spellings():
    assert "--rpc.port, --port int" in help_text(RewardServeConfig, "quartet serve reward")
    assert "--algo.advantage_estimator" in help_text(PpoConfig, "quartet train ppo")


def test_defaults_as_typed():
    assert shown_default((0.9, 0.95)) == "0.9 0.95"
    assert shown_default("") == "''"
    assert shown_default("User: {}\n") == r"'User: {}\n'"
    assert shown_default(None) == "None"
