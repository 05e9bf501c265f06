from __future__ import annotations

import pytest

from quartet.config import PpoConfig
from quartet.config.tree import flat, leaves, nested, sections, suggestion, value_of, wrong


def test_names_and_types():
    known = leaves(PpoConfig)
    assert known["actor.adam.betas"].type_name == "float x2"
    assert known["ds.lora.target_modules"].type_name == "str x*"
    assert known["actor.dual_clip"].type_name == "float"
    assert known["actor.dual_clip"].is_optional
    assert known["algo.kl.estimator"].type_name == "str {k1,k2,k3}"
    assert known["train.colocate_all"].is_bool
    assert known["actor.eps_clip_low_high"].is_sequence
    assert known["run.dir"].is_text
    assert not known["actor.adam.lr"].is_text


def test_sections():
    assert {"actor", "actor.adam", "algo.kl", "ds.lora"} <= sections(PpoConfig)
    assert "actor.adam.lr" not in sections(PpoConfig)


def test_flat_and_nested_are_inverse():
    values = flat(PpoConfig())
    assert flat_dict(nested(values)) == values
    assert value_of(PpoConfig(), "algo.kl.horizon") == 10000


def flat_dict(tree: dict[str, object], prefix: str = "") -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            found |= flat_dict(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value
    return found


@pytest.mark.parametrize(
    ("word", "close"),
    [
        ("a.beta", "a.betas"),  # the beginning
        ("b.lr", "b.x.lr"),  # the end, in the same section
        ("lr", "a.lr"),  # the end, anywhere
        ("a.bteas", "a.betas"),  # a slip
        ("zzz", ""),
    ],
)
def test_suggestion(word: str, close: str):
    found = suggestion(word, ["a.lr", "b.x.lr", "a.betas"])
    assert found == (f"did you mean {close}?" if close else "")


def test_wrong():
    error = wrong("reward.clip_range", (1.0, 0.5), "the range is empty", "give LOW < HIGH")
    assert str(error) == "--reward.clip_range 1.0 0.5: the range is empty (give LOW < HIGH)"
    assert (error.info.field, error.info.value) == ("reward.clip_range", "1.0 0.5")
    assert str(wrong("a.b", None, "is missing", "give it")).startswith("--a.b: is missing")
