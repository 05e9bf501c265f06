"""How a frozen model is loaded, and what its digest depends on."""

import importlib.util
import logging

import pytest
import torch

from quartet.config.ds import LoadConfig
from quartet.errors import ConfigError
from quartet.nn.digest import model_digest
from quartet.nn.loading import attention_kernels, load_arguments, loading_error

CPU = torch.device("cpu")


def test_arguments_of_from_pretrained():
    config = LoadConfig(param_dtype="bf16", attn_implementation="eager", trust_remote_code=True)
    assert load_arguments(config, CPU) == {
        "dtype": torch.bfloat16,
        "attn_implementation": "eager",
        "trust_remote_code": True,
    }
    experts = LoadConfig(experts_implementation="grouped_mm")
    assert load_arguments(experts, CPU)["experts_implementation"] == "grouped_mm"


@pytest.mark.parametrize(
    ("device", "installed", "kernels"),
    [("cpu", True, "sdpa"), ("cuda", False, "sdpa"), ("cuda", True, "flash_attention_2")],
)
def test_flash_attention_only_where_it_runs(device, installed, kernels, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    found = object() if installed else None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    assert attention_kernels("flash_attention_2", torch.device(device)) == kernels
    assert ("in place of flash_attention_2" in caplog.text) == (kernels == "sdpa")
    assert attention_kernels("eager", torch.device(device)) == "eager"


def test_quantised_weights_are_refused():
    with pytest.raises(ConfigError, match="load_in_4bit") as caught:
        load_arguments(LoadConfig(load_in_4bit=True), CPU)
    assert caught.value.info.remedy == "leave it out"


def test_what_transformers_says_becomes_one_line():
    error = loading_error(OSError("no such thing\nsecond line"), "a/b", "ref.model_name_or_path")
    assert str(error).startswith("cannot load a model from 'a/b': no such thing (")
    assert error.info.field == "ref.model_name_or_path"
    assert "ValueError" in str(loading_error(ValueError(), "a/b", "f"))


def test_the_digest_depends_on_every_weight_and_on_the_dtype():
    def model(seed):
        torch.manual_seed(seed)
        return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))

    assert model_digest(model(0)) == model_digest(model(0))
    changed = model(0)
    with torch.no_grad():
        changed[1].bias[1] += 1e-6
    digests = {model_digest(m) for m in (model(0), model(1), changed, model(0).bfloat16())}
    assert len(digests) == 4


def test_shared_weights_count_once():
    one = torch.nn.Linear(3, 3)
    assert model_digest(torch.nn.Sequential(one)) == model_digest(torch.nn.Sequential(one, one))
