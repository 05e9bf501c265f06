"""Adapters become part of the model: the language model's, and the reward model's with its head."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from quartet.cli import main as quartet
from quartet.testing.tiny import TinyShape, make_tiny_model

IDS = torch.tensor([[5, 6, 7, 8, 9]])


def make_adapter(base: Path, folder: Path, kind: str, targets: str | list[str] = "all-linear"):
    """A peft adapter with something in it, and what base and adapter give together."""
    auto = AutoModelForCausalLM if kind == "CAUSAL_LM" else AutoModelForSequenceClassification
    options = {} if kind == "CAUSAL_LM" else {"num_labels": 1}
    model = auto.from_pretrained(base, dtype=torch.float32, **options)
    adapted = get_peft_model(model, LoraConfig(r=3, target_modules=targets, task_type=kind))
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.1)
        outputs = adapted.eval()(IDS).logits
    adapted.save_pretrained(folder)
    return outputs


def test_a_language_model(tiny_model_dir, tmp_path, capsys):
    expected = make_adapter(tiny_model_dir, tmp_path / "adapter", "CAUSAL_LM")
    out = tmp_path / "new" / "merged"
    command = ["tools", "merge-lora", str(tmp_path / "adapter"), str(tiny_model_dir), str(out)]
    assert quartet(command) == 0
    assert "merged" in capsys.readouterr().out
    model = AutoModelForCausalLM.from_pretrained(out).eval()
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    with torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, expected, rtol=1e-4, atol=1e-5)
    assert (out / "tokenizer.json").is_file()
    assert [p.name for p in out.parent.iterdir()] == ["merged"]
    # It does not write over what is there.
    assert quartet(command) == 2
    assert f"{out} exists" in capsys.readouterr().err


def test_a_reward_model_keeps_its_head_and_its_config(tiny_model_dir, tmp_path):
    expected = make_adapter(tiny_model_dir, tmp_path / "adapter", "SEQ_CLS")
    extra = {"mean": 0.5, "std": 2.0, "value_head_prefix": "v_head"}
    (tmp_path / "adapter" / "model_config.json").write_text(json.dumps(extra))
    out = tmp_path / "merged"
    arguments = [str(tmp_path / "adapter"), str(tiny_model_dir), str(out), "--dtype", "fp32"]
    assert quartet(["tools", "merge-lora", *arguments]) == 0
    config = AutoConfig.from_pretrained(out)
    assert {name: getattr(config, name) for name in extra} == extra
    assert config.num_labels == 1
    stored = load_file(out / "model.safetensors")
    head = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    trained = next(tensor for name, tensor in head.items() if name.endswith("score.weight"))
    assert torch.equal(stored["v_head.weight"], trained)
    model = AutoModelForSequenceClassification.from_pretrained(out).eval()
    with torch.no_grad():
        model.score.weight.copy_(stored["v_head.weight"])
        torch.testing.assert_close(model(IDS).logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layers", [1, 3])
def test_a_base_with_other_layers_is_refused(tiny_model_dir, tmp_path, capsys, layers):
    make_adapter(tiny_model_dir, tmp_path / "adapter", "CAUSAL_LM", ["q_proj", "up_proj"])
    base = make_tiny_model(tmp_path / "base", shape=TinyShape(layers=layers))
    arguments = [str(tmp_path / "adapter"), str(base), str(tmp_path / "merged")]
    assert quartet(["tools", "merge-lora", *arguments]) == 2
    who = "the adapter" if layers == 1 else "the model"
    assert f"only {who} has a place for base_model.model.model.layers." in capsys.readouterr().err
    assert not (tmp_path / "merged").exists()


def test_a_base_without_its_head_is_refused(tiny_model_dir, tmp_path, capsys):
    base = make_tiny_model(tmp_path / "base", head="reward", tied=False)
    make_adapter(tiny_model_dir, tmp_path / "adapter", "CAUSAL_LM")
    arguments = [str(tmp_path / "adapter"), str(base), str(tmp_path / "merged")]
    assert quartet(["tools", "merge-lora", *arguments]) == 2
    assert "it has no lm_head.weight" in capsys.readouterr().err


def test_a_missing_package_is_named(tiny_model_dir, tmp_path, capsys, monkeypatch):
    (tmp_path / "adapter_config.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "peft", None)
    arguments = [str(tmp_path), str(tiny_model_dir), str(tmp_path / "out")]
    assert quartet(["tools", "merge-lora", *arguments]) == 2
    assert "needs the package peft" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["adapter_config.json"]


@pytest.mark.parametrize("missing", ["adapter", "base"])
def test_what_is_not_there_is_named(tiny_model_dir, tmp_path, capsys, missing):
    make_adapter(tiny_model_dir, tmp_path / "adapter", "CAUSAL_LM")
    paths = {"adapter": tmp_path / "adapter", "base": tiny_model_dir} | {missing: tmp_path / "no"}
    out = tmp_path / "out"
    arguments = [str(paths["adapter"]), str(paths["base"]), str(out)]
    assert quartet(["tools", "merge-lora", *arguments]) == 2
    assert str(tmp_path / "no") in capsys.readouterr().err
    assert not out.exists()
