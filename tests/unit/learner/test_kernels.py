"""What is said to flash attention, Liger and DeepSpeed's compiler; none of them runs on a CPU."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from quartet_learner import deepcompile, kernels
from quartet_learner.attention import check_packing, packed_arguments
from quartet_learner.model import load_model
from quartet_learner.settings import LearnerSettings
from transformers import AutoModelForCausalLM, modeling_flash_attention_utils

from quartet.errors import ConfigError
from quartet.nn import model_inputs

from .steps import make_sequences

LENGTHS = (5, 9, 3)


def varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **options):
    """Stands for flash_attn_varlen_func: torch's attention over the sequences it is told of."""
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert max_seqlen_q == max_seqlen_k == int(cu_seqlens_q.diff().max())
    assert options["causal"]
    parts = []
    for begin, end in zip(cu_seqlens_q[:-1].tolist(), cu_seqlens_q[1:].tolist(), strict=True):
        q_, k_, v_ = (t[begin:end].transpose(0, 1) for t in (q, k, v))
        repeat = len(q_) // len(k_)
        k_, v_ = (t.repeat_interleave(repeat, 0) for t in (k_, v_))
        out = torch.nn.functional.scaled_dot_product_attention(
            q_, k_, v_, is_causal=True, scale=options.get("softmax_scale")
        )
        parts.append(out.transpose(0, 1))
    return torch.cat(parts)


def test_packed_rows_reach_flash_attention_with_the_bounds_of_their_sequences(
    tiny_model_dir, monkeypatch
):
    seen = []

    def recorded(*args, **options):
        seen.append(options["cu_seqlens_q"].tolist())
        return varlen(*args, **options)

    def process(**options):
        names = {"softmax_scale": "softmax_scale", "is_causal": "causal"}
        found = {names[n]: v for n, v in options.items() if n in names}
        return found | {n: options[n] for n in ("max_seqlen_q", "max_seqlen_k") if n in options}

    monkeypatch.setattr(
        modeling_flash_attention_utils,
        "lazy_import_flash_attention",
        lambda *_, **__: ((None, recorded, None, None, None), (process, process)),
    )
    model, _ = load_model(LearnerSettings(model_name_or_path=str(tiny_model_dir), packed=True))
    inputs = model_inputs(make_sequences(0, LENGTHS), packed=True, device="cpu")
    rows = torch.arange(16)
    targets = inputs.input_ids[0, 1:]
    with torch.no_grad():
        expected, *_ = model(inputs, rows, targets=targets)
        model.hf.config._attn_implementation = "flash_attention_2"
        found, *_ = model(inputs, rows, targets=targets)
    assert seen
    assert all(bounds == [0, 5, 14, 17] for bounds in seen)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_bounds_are_for_flash_attention_on_packed_rows_alone():
    packed = model_inputs(make_sequences(0, LENGTHS), packed=True, device="cpu")
    padded = model_inputs(make_sequences(0, LENGTHS), packed=False, device="cpu")
    told = packed_arguments(packed, "flash_attention_3")
    assert told["cu_seq_lens_q"].tolist() == told["cu_seq_lens_k"].tolist() == [0, 5, 14, 17]
    assert told["max_length_q"] == told["max_length_k"] == 9
    assert packed_arguments(packed, "sdpa") == {}
    assert packed_arguments(padded, "flash_attention_2") == {}


def test_models_with_a_state_are_not_packed(tiny_model_dir):
    hf = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    check_packing(hf)
    hf.config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(ConfigError, match="linear_attention") as caught:
        check_packing(hf)
    assert caught.value.info.field == "ds.packing_samples"


def liger(monkeypatch, kinds: tuple[str, ...]) -> list[dict[str, Any]]:
    """A package liger_kernel that records what it is asked to do."""
    calls: list[dict[str, Any]] = []
    patch: Any = types.ModuleType("liger_kernel.transformers.monkey_patch")
    patch.MODEL_TYPE_TO_APPLY_LIGER_FN = dict.fromkeys(kinds)
    patch._apply_liger_kernel_to_instance = lambda **options: calls.append(options)
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, patch.__name__, patch)
    return calls


def test_liger_patches_layers_and_leaves_the_loss_to_us(tiny_model_dir: Path, monkeypatch):
    calls = liger(monkeypatch, ("llama",))
    hf = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    kernels.apply_liger(hf)
    assert calls == [{"model": hf, "cross_entropy": False, "fused_linear_cross_entropy": False}]


def test_liger_that_cannot_be_had_is_refused(tiny_model_dir: Path, monkeypatch):
    hf = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    liger(monkeypatch, ("gemma",))
    with pytest.raises(ConfigError, match="type llama") as caught:
        kernels.apply_liger(hf)
    assert caught.value.info.field == "ds.use_liger_kernel"
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.monkey_patch", None)
    with pytest.raises(ConfigError, match="cannot be loaded"):
        kernels.apply_liger(hf)


def test_deepcompile_is_asked_for_and_refused_without_a_gpu():
    settings = LearnerSettings(model_name_or_path="m", deepcompile=True)
    assert deepcompile.deepspeed_section(settings) == {"compile": {"deepcompile": True}}
    assert deepcompile.deepspeed_section(LearnerSettings(model_name_or_path="m")) == {}
    with pytest.raises(ConfigError) as caught:
        deepcompile.check_device()
    assert caught.value.info.field == "ds.deepcompile"


def test_only_an_engine_that_was_asked_to_is_compiled():
    compiled = []
    engine = types.SimpleNamespace(compile=lambda: compiled.append(True))
    deepcompile.compile_engine(engine, LearnerSettings(model_name_or_path="m"))
    assert compiled == []
    deepcompile.compile_engine(engine, LearnerSettings(model_name_or_path="m", deepcompile=True))
    assert compiled == [True]
