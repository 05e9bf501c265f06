"""Adapters: what is trained, what others see of it, and what is left on disk."""

from __future__ import annotations

import json
import logging

import numpy as np
import pytest
import torch
from peft import PeftModel
from quartet_learner import checkpoint
from quartet_learner.engine import LearnerEngine
from quartet_learner.gather import trained_parameters, whole
from quartet_learner.lora import target_modules
from quartet_learner.served import loaded_digest, served_manifest, served_tensors
from quartet_learner.settings import LearnerSettings
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from quartet.errors import ConfigError, RequestError
from quartet.nn.digest import model_digest
from quartet.types import (
    Head,
    KlLoss,
    MuonConfig,
    OptimizerConfig,
    PairwiseLoss,
    PolicyLoss,
    RunSpec,
    ScheduleConfig,
    SftLoss,
    ValueLoss,
)
from quartet.types.requests import ExportModelRequest
from quartet.weights import manifest_of_model, plan_buckets, unpack_bucket

from .conftest import weights_of
from .steps import logprobs_of, make_samples, make_sequences, step_of
from .test_checkpoint import load, run_steps, save

LORA = {"lora_rank": 4, "lora_alpha": 8}


def pushed(engine, bucket_bytes=16 << 10) -> dict[str, torch.Tensor]:
    from dataclasses import replace

    manifest = replace(served_manifest(engine.model.hf), bucket_bytes=bucket_bytes)
    plan = plan_buckets(manifest)
    return {
        name: tensor.clone()
        for index, flat in engine.buckets(manifest)
        for name, tensor in unpack_bucket(plan[index], flat)
    }


def export(engine, folder, **values):
    engine.export_model(
        ExportModelRequest(request_id="e", folder=str(folder), config_values=values)
    )
    return folder


def trained(engine, loss=None, steps=2, lr_steps=0):
    for number in range(lr_steps, lr_steps + steps):
        assert engine.train(step_of(loss or SftLoss(), number), make_samples(number)).applied
    return engine


def load_base(folder, head=Head.LM):
    if head is Head.LM:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return AutoModelForSequenceClassification.from_pretrained(
        folder, dtype=torch.float32, num_labels=1
    )


def test_only_adapters_are_trained_and_the_log_says_how_many(make_engine, caplog):
    with caplog.at_level(logging.INFO, logger="quartet_learner"):
        engine = make_engine(lr=1e-2, **LORA)
    before = weights_of(engine)
    trained(engine)
    after = weights_of(engine)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name in before if ".lora_" in name}
    assert len(moved) == 2 * 7 * 2  # A and B, seven matrices a layer, two layers
    count = sum(before[name].numel() for name in moved)
    assert engine.num_parameters == count
    assert f"{count:,} parameters" in caplog.text
    assert "rank 4 on down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj" in caplog.text


def test_fault_42_names_and_digest_are_those_of_the_model_without(make_engine, tiny_model_dir):
    engine = make_engine(**LORA)
    plain = load_base(tiny_model_dir)
    assert served_manifest(engine.model.hf) == manifest_of_model(plain)
    assert loaded_digest(engine.model.hf) == model_digest(plain)
    # Without adapters there is no second way of naming.
    without = make_engine().model.hf
    assert served_manifest(without) == manifest_of_model(without)


def test_training_starts_at_the_model_as_it_was_loaded(make_engine):
    sequences = make_sequences()
    base = logprobs_of(make_engine(), sequences)
    engine = make_engine(lora_dropout=0.5, **LORA)
    np.testing.assert_array_equal(logprobs_of(engine, sequences), base)
    samples = make_samples()
    from dataclasses import replace

    samples = replace(samples, old_logprobs=base, ref_logprobs=base)
    loss = PolicyLoss(kl_loss=KlLoss(coef=0.1, estimator="k3"))
    metrics = engine.train(step_of(loss), samples).metrics
    assert metrics["ppo_ratio"] == pytest.approx(1.0, abs=1e-6)
    assert metrics["kl"] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_push_is_what_peft_merges(make_engine, tmp_path, tiny_model_dir, stage):
    engine = trained(make_engine(zero_stage=stage, lr=1e-2, **LORA))
    before = weights_of(engine)
    sent = pushed(engine)
    assert all(torch.equal(weight, weights_of(engine)[name]) for name, weight in before.items())
    folder = export(engine, tmp_path / "out")
    merged = PeftModel.from_pretrained(load_base(tiny_model_dir), folder / "adapter")
    merged = merged.merge_and_unload()
    expected = dict(merged.named_parameters())
    assert sent.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(sent[name], weight.detach(), rtol=1e-6, atol=1e-8)
    # And the merged model scores like the adapted one.
    stored = AutoModelForCausalLM.from_pretrained(folder)
    assert stored.get_input_embeddings().weight is stored.get_output_embeddings().weight
    assert all(torch.equal(dict(stored.named_parameters())[n], w) for n, w in sent.items())
    sequences = make_sequences()
    other = make_engine(model=folder)
    np.testing.assert_allclose(
        logprobs_of(engine, sequences), logprobs_of(other, sequences), atol=2e-5
    )


def test_merging_is_in_fp32_whatever_the_weights_are(make_engine):
    engine = trained(make_engine(zero_stage=2, param_dtype="bfloat16", lr=2e-2, **LORA))
    sent = pushed(engine)
    named = weights_of(engine)
    name = "model.layers.0.mlp.up_proj"
    product = named[f"{name}.lora_B.default.weight"] @ named[f"{name}.lora_A.default.weight"]
    expected = (named[f"{name}.base_layer.weight"] + product * 2.0).bfloat16()
    assert torch.equal(sent[f"{name}.weight"], expected)
    assert not torch.equal(sent[f"{name}.weight"].float(), named[f"{name}.base_layer.weight"])


@pytest.mark.parametrize(("head", "loss"), [("value", ValueLoss()), ("reward", PairwiseLoss())])
def test_fault_06_a_scalar_head_is_trained_and_saved(
    make_engine, tmp_path, tiny_model_dir, head, loss
):
    engine = make_engine(head=Head(head), value_head_prefix="v_head", lr=1e-2, **LORA)
    before = engine.model.hf.score.weight.detach().clone()
    trained(engine, loss)
    now = engine.model.hf.score.weight.detach()
    assert (now - before).abs().min() > 1e-4
    folder = export(engine, tmp_path / "out", mean=0.25, std=2.0)
    stored = load_file(folder / "model.safetensors")
    assert torch.equal(stored["v_head.weight"], now)
    assert not [name for name in stored if "lora" in name or "base_layer" in name]
    config = AutoConfig.from_pretrained(folder)
    assert (config.mean, config.std, config.value_head_prefix) == (0.25, 2.0, "v_head")
    # A learner reads the merged folder; peft reads the adapter.
    request = {"model": folder, "head": Head(head), "value_head_prefix": "v_head"}
    sequences = make_sequences()
    expected = logprobs_of(engine, sequences)
    np.testing.assert_allclose(logprobs_of(make_engine(**request), sequences), expected, atol=2e-5)
    loaded = PeftModel.from_pretrained(load_base(tiny_model_dir, Head.REWARD), folder / "adapter")
    assert torch.equal(loaded.merge_and_unload().score.weight, now)
    extra = json.loads((folder / "adapter" / "model_config.json").read_text())
    assert extra == {"mean": 0.25, "std": 2.0, "value_head_prefix": "v_head", "num_labels": 1}


def test_fault_07_averages_go_by_name_and_are_exported_merged(make_engine, tmp_path):
    beta = 0.75
    engine = make_engine(lr=1e-2, ema_beta=beta, **LORA)
    average = {n: p.detach().clone() for n, p in trained_parameters(engine.model.hf).items()}
    for number in range(3):
        trained(engine, steps=1, lr_steps=number)
        for name, parameter in trained_parameters(engine.model.hf).items():
            average[name] = beta * average[name] + (1 - beta) * parameter.detach()
    assert engine.run.average.values.keys() == average.keys()
    folder = export(engine, tmp_path / "out")
    stored = load_file(folder / "model.safetensors")
    name = "model.layers.1.self_attn.v_proj"
    a, b = (average[f"{name}.lora_{part}.default.weight"] for part in "AB")
    base = weights_of(engine)[f"{name}.base_layer.weight"]
    torch.testing.assert_close(stored[f"{name}.weight"], base + 2.0 * b @ a, rtol=1e-5, atol=1e-7)
    adapter = load_file(folder / "adapter" / "adapter_model.safetensors")
    torch.testing.assert_close(adapter[f"base_model.model.{name}.lora_A.weight"], a)
    assert not torch.equal(stored[f"{name}.weight"], pushed(engine)[f"{name}.weight"])


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_any_stage_takes_the_same_steps(make_engine, stage):
    results, weights = [], []
    for at in (0, stage):
        engine = make_engine(zero_stage=at, lr=1e-3, **LORA)
        results.append([engine.train(step_of(number=n), make_samples(n)) for n in range(2)])
        with whole(engine.model.hf.parameters()):
            weights.append({t.name: t.value().clone() for t in served_tensors(engine.model.hf)})
    for one, other in zip(*results, strict=True):
        assert other.grad_norm == pytest.approx(one.grad_norm, rel=1e-5)
        assert other.metrics == pytest.approx(one.metrics, rel=1e-5, abs=1e-6)
    for name, weight in weights[0].items():
        torch.testing.assert_close(weights[1][name], weight, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_nothing(make_engine, reentrant):
    plain = make_engine(**LORA).train(step_of(), make_samples())
    engine = make_engine(
        gradient_checkpointing=True, gradient_checkpointing_reentrant=reentrant, **LORA
    )
    result = engine.train(step_of(), make_samples())
    assert result.grad_norm == pytest.approx(plain.grad_norm, rel=1e-5)
    assert result.grad_norm > 0


def test_a_gradient_that_is_not_finite_moves_no_adapter(make_engine):
    from dataclasses import replace

    engine = make_engine(lr=1e-2, **LORA)
    before = weights_of(engine)
    samples = make_samples()
    bad = replace(samples, advantages=np.full_like(samples.advantages, 3e38))
    result = engine.train(step_of(), bad)
    assert not result.applied
    assert all(torch.equal(weight, weights_of(engine)[name]) for name, weight in before.items())


@pytest.mark.parametrize("stage", [0, 2])
def test_frozen_weights_sleep_and_wake_too(make_engine, monkeypatch, stage):
    engine = trained(make_engine(zero_stage=stage, lr=1e-2, **LORA), steps=1)
    before = weights_of(engine)
    frozen = [p for p in engine.model.hf.parameters() if not p.requires_grad]
    places = [p.data_ptr() for p in frozen]
    # A copy in place of a move: here both ends are the same memory.
    to = torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "to", lambda t, *a, **k: to(t, *a, **k).clone())
    engine.sleep()
    if stage > 0:
        assert not {p.data_ptr() for p in frozen} & set(places)
    engine.wake()
    monkeypatch.undo()
    assert all(torch.equal(weight, weights_of(engine)[name]) for name, weight in before.items())
    trained(engine, steps=1, lr_steps=1)


def test_dropout_is_in_training_alone(make_engine):
    engine = trained(make_engine(lr=2e-2, lora_dropout=0.5, **LORA), steps=3)
    sequences = make_sequences()
    once = logprobs_of(engine, sequences)
    np.testing.assert_array_equal(logprobs_of(engine, sequences), once)
    quiet = trained(make_engine(lr=2e-2, **LORA), steps=3)
    assert not np.array_equal(logprobs_of(quiet, sequences), once)


@pytest.mark.parametrize(("stage", "dtype"), [(0, "float32"), (2, "bfloat16"), (3, "float32")])
def test_a_continued_run_is_bit_for_bit_the_undisturbed_one(make_engine, tmp_path, stage, dtype):
    common = {"zero_stage": stage, "param_dtype": dtype, "lr": 5e-3, "lora_dropout": 0.2, **LORA}
    engine = make_engine(ema_beta=0.5, **common)
    run_steps(engine, 0, 2)
    saved = save(engine, tmp_path, "two")
    expected = run_steps(engine, 2, 2)
    # Adam's two states, the average and the fp32 values of adapters; nothing of the frozen base.
    assert saved.size_bytes < 4 * 4 * engine.num_parameters + 50_000
    other = make_engine(run_id="other", seed=9, **common)
    load(other, tmp_path)
    assert run_steps(other, 2, 2) == expected
    for name, weight in weights_of(engine).items():
        assert torch.equal(weight, weights_of(other)[name]), name
    averages = engine.run.average.values
    assert all(torch.equal(v, other.run.average.values[n]) for n, v in averages.items())


def test_a_checkpoint_of_other_adapters_is_refused(make_engine, group, tmp_path):
    save(make_engine(**LORA), tmp_path, "saved")
    stored = checkpoint.describe(tmp_path, "saved")
    checkpoint.check_fits(stored, make_engine(**LORA).model, group)
    for settings, said in (
        ({"lora_rank": 8, "lora_alpha": 16}, "another model"),
        ({"lora_rank": 4, "lora_alpha": 16}, "scaled by 2.0"),
        ({"lora_targets": ("q_proj",), **LORA}, "another model"),
        ({}, "another model"),
    ):
        with pytest.raises(RequestError, match=said):
            checkpoint.check_fits(stored, make_engine(**settings).model, group)


def test_a_checkpoint_of_adapters_on_another_model_is_refused(make_engine, group, tmp_path):
    from quartet.testing.tiny import make_tiny_model

    save(trained(make_engine(**LORA)), tmp_path, "saved")
    stored = checkpoint.describe(tmp_path, "saved")
    checkpoint.check_fits(
        stored, make_engine(param_dtype="bfloat16", zero_stage=3, **LORA).model, group
    )
    other = make_tiny_model(tmp_path / "other", seed=5)
    with pytest.raises(RequestError, match="adapters on other weights") as caught:
        checkpoint.check_fits(stored, make_engine(model=other, **LORA).model, group)
    assert caught.value.info.field == "learner.model_name_or_path"


def test_a_second_run_begins_with_adapters_of_its_own_seed(make_engine):
    engine = trained(make_engine(lr=1e-2, seed=1, **LORA))

    def begin(run_id: str, seed: int):
        engine.start_run(
            RunSpec(
                run_id=run_id,
                optimizer=OptimizerConfig(lr=1e-2),
                schedule=ScheduleConfig(name="constant", total_steps=1),
                seed=seed,
            )
        )
        return weights_of(engine)

    one, again, other = begin("b", 1), begin("c", 1), begin("d", 2)
    assert all(torch.equal(one[name], again[name]) for name in one)
    name = "model.layers.0.mlp.up_proj.lora_A.default.weight"
    assert not torch.equal(one[name], other[name])
    assert not one[name.replace("lora_A", "lora_B")].any()


def test_named_targets(make_engine):
    engine = make_engine(lora_targets=("q_proj", "layers.1.mlp.up_proj"), **LORA)
    adapted = {name.partition(".lora_")[0] for name in trained_parameters(engine.model.hf)}
    assert adapted == {
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.self_attn.q_proj",
        "model.layers.1.mlp.up_proj",
    }


@pytest.mark.parametrize("wrong", ["query", "lm_head", "embed_tokens", "score"])
@pytest.mark.parametrize("head", [Head.LM, Head.REWARD])
def test_an_unknown_target_names_those_there_are(group, tiny_model_dir, wrong, head):
    settings = LearnerSettings(
        model_name_or_path=str(tiny_model_dir),
        head=head,
        lora_rank=4,
        lora_targets=("q_proj", wrong),
    )
    with pytest.raises(ConfigError, match=wrong) as caught:
        LearnerEngine(settings, group)
    assert caught.value.info.field == "ds.lora.target_modules"
    assert "q_proj" in caught.value.info.remedy


def test_settings_travel_to_other_ranks():
    settings = LearnerSettings(model_name_or_path="m", lora_targets=("a", "b"), **LORA)
    assert LearnerSettings.from_json(settings.to_json()) == settings


def test_muon_is_refused():
    from quartet_learner.checks import check_run

    spec = RunSpec(
        run_id="r",
        optimizer=OptimizerConfig(type="muon", lr=1e-3, muon=MuonConfig()),
        schedule=ScheduleConfig(name="constant", total_steps=1),
    )
    check_run(spec, 0)
    with pytest.raises(ConfigError, match="factors"):
        check_run(spec, 0, adapters=True)


def test_a_layer_stored_transposed_is_merged_right(tmp_path, make_engine):
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=384, n_positions=64, n_embd=32, n_layer=1, n_head=2)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    engine = trained(make_engine(model=tmp_path / "gpt2", lr=1e-2, **LORA))
    folder = export(engine, tmp_path / "out")
    merged = PeftModel.from_pretrained(load_base(tmp_path / "gpt2"), folder / "adapter")
    stored = load_file(folder / "model.safetensors")
    for name, weight in merged.merge_and_unload().named_parameters():
        short = name if name in stored else name.removeprefix("transformer.")
        torch.testing.assert_close(stored[short], weight.detach(), rtol=1e-6, atol=1e-8)


def test_experts_stay_and_attention_adapts(tiny_moe_dir):
    model = AutoModelForCausalLM.from_pretrained(tiny_moe_dir)
    assert target_modules(model, ("all-linear",)) == ["k_proj", "o_proj", "q_proj", "v_proj"]
