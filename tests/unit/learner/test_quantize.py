"""Weights in 4 bits: refused where they cannot work, and whole wherever they leave the learner."""

from __future__ import annotations

import json

import pytest
import torch
from quartet_learner import quantize
from quartet_learner.served import loaded_digest, served_manifest
from quartet_learner.settings import LearnerSettings
from safetensors.torch import load_file

from quartet.errors import ConfigError
from quartet.types import Head, SftLoss, ValueLoss

from .test_lora import export, pushed, trained

WANTED = LearnerSettings(model_name_or_path="m", load_in_4bit=True, lora_rank=4)


def test_nothing_changes_without_the_flag():
    assert quantize.loading_options(LearnerSettings(model_name_or_path="m")) == {}


@pytest.mark.parametrize(("gpu", "missing"), [(False, "GPU"), (True, "bitsandbytes")])
def test_what_is_missing_is_named(monkeypatch, gpu, missing):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(quantize.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=missing) as caught:
        quantize.loading_options(WANTED)
    assert caught.value.info.field == "ds.load_in_4bit"


@pytest.mark.slow
@pytest.mark.parametrize(("head", "loss"), [("lm", SftLoss()), ("value", ValueLoss())])
def test_what_leaves_the_learner_is_whole(
    make_engine, monkeypatch, tmp_path, tiny_model_dir, head, loss
):
    """On the CPU, which bitsandbytes knows too; the layout of the weights is that of a GPU."""
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    monkeypatch.setattr(quantize, "check_machine", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    common = {"head": Head(head), "param_dtype": "bfloat16", "zero_stage": 2, "lr": 2e-2}
    engine = make_engine(load_in_4bit=True, lora_rank=4, **common)
    assert "Params4bit" in {type(p).__name__ for p in engine.model.hf.parameters()}
    plain = make_engine(**common)
    assert served_manifest(engine.model.hf) == served_manifest(plain.model.hf)
    assert loaded_digest(engine.model.hf) != loaded_digest(plain.model.hf)
    loaded = pushed(engine)
    for name, weight in plain.model.hf.named_parameters():
        rounding = (loaded[name].float() - weight.float()).abs().max()
        assert rounding < 0.3 * weight.float().abs().max(), name
    trained(engine, loss)
    sent = pushed(engine)
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(sent[name], loaded[name])
    folder = export(engine, tmp_path / "out")
    assert torch.equal(load_file(folder / "model.safetensors")[name], sent[name])
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
