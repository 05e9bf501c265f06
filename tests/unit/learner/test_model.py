"""Heads: how they are found, made, named and normalised, and how models are exported."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from quartet_learner.model import load_model
from quartet_learner.settings import LearnerSettings
from safetensors import safe_open

from quartet.errors import ConfigError, FatalError
from quartet.types import Head, PairwiseLoss, SftLoss, ValueLoss
from quartet.types.requests import ExportModelRequest, ForwardRequest

from .conftest import weights_of
from .steps import make_samples, make_sequences, step_of


def outputs(engine, sequences):
    return engine.forward(ForwardRequest(chunk_id="c", sequences=sequences)).output


def export(engine, folder, **config_values):
    return engine.export_model(
        ExportModelRequest(request_id="e", folder=str(folder), config_values=config_values)
    )


def scores_by_transformers(folder, sequences):
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        hidden = [
            model.base_model(torch.tensor(row.tolist())[None]).last_hidden_state[0]
            for row in sequences.rows()
        ]
        return [model.score(h)[:, 0].numpy() for h in hidden]


def test_reward_is_the_score_of_the_last_token(make_engine, tiny_reward_model_dir):
    sequences = make_sequences()
    engine = make_engine(model=tiny_reward_model_dir, head=Head.REWARD)
    scores = scores_by_transformers(tiny_reward_model_dir, sequences)
    np.testing.assert_allclose(outputs(engine, sequences), [s[-1] for s in scores], atol=1e-5)


def test_value_of_a_token_is_that_of_the_state_before_it(make_engine, tiny_reward_model_dir):
    sequences = make_sequences()
    engine = make_engine(model=tiny_reward_model_dir, head=Head.VALUE, packed=True)
    scores = scores_by_transformers(tiny_reward_model_dir, sequences)
    expected = np.concatenate([np.concatenate([[0], s[:-1]]) for s in scores])
    np.testing.assert_allclose(outputs(engine, sequences), expected, atol=1e-5)


def test_a_new_head_is_drawn_from_the_seed_of_the_run(make_engine):
    heads = [
        weights_of(make_engine(head=Head.VALUE, seed=seed))["score.weight"] for seed in (1, 1, 2)
    ]
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])
    std = 1 / (heads[0].shape[1] + 1)
    assert heads[0].std().item() == pytest.approx(std, rel=0.4)
    assert heads[0].abs().max() < 5 * std


def test_a_head_that_comes_with_the_model_is_kept_unless_a_new_one_is_asked_for(
    make_engine, tiny_reward_model_dir
):
    with safe_open(tiny_reward_model_dir / "model.safetensors", "pt") as stored:
        own = stored.get_tensor("score.weight").float()
    kept = make_engine(model=tiny_reward_model_dir, head=Head.VALUE)
    assert torch.equal(weights_of(kept)["score.weight"], own)
    new = make_engine(model=tiny_reward_model_dir, head=Head.VALUE, new_head=True)
    assert not torch.equal(weights_of(new)["score.weight"], own)


def test_normalisation_uses_the_numbers_of_the_config(make_engine, tmp_path, tiny_reward_model_dir):
    raw = make_engine(model=tiny_reward_model_dir, head=Head.REWARD)
    export(raw, tmp_path / "rm", mean=0.5, std=2.0)
    assert json.loads((tmp_path / "rm" / "config.json").read_text())["std"] == 2.0
    sequences = make_sequences()
    expected = (outputs(raw, sequences) - 0.5) / 2.0
    for head in (Head.REWARD, Head.VALUE):
        engine = make_engine(model=tmp_path / "rm", head=head, normalize=True)
        got = outputs(engine, sequences)
        if head is Head.REWARD:
            np.testing.assert_allclose(got, expected, atol=1e-6)
        else:
            assert (got[sequences.offsets[:-1]] == 0).all()
    # The numbers of one export do not stay behind in the next.
    export(raw, tmp_path / "again")
    assert "std" not in json.loads((tmp_path / "again" / "config.json").read_text())


@pytest.mark.parametrize("stage", [0, 3])
def test_an_exported_language_model_is_the_trained_one(make_engine, tmp_path, stage):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    engine = make_engine(zero_stage=stage, lr=1e-2)
    engine.train(step_of(SftLoss()), make_samples())
    saved = export(engine, tmp_path / "out")
    assert saved.size_bytes > 100_000
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.config.use_cache
    assert model.lm_head.weight is model.model.embed_tokens.weight
    sequences = make_sequences()
    log_p = model(torch.tensor(sequences.rows()[0].tolist())[None]).logits[0].log_softmax(-1)
    expected = [log_p[t - 1, sequences.token_ids[t]].item() for t in range(1, 5)]
    np.testing.assert_allclose(outputs(engine, sequences)[1:5], expected, atol=1e-5)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.decode(tokenizer("a good day").input_ids) == "a good day"
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as stored:
        assert "lm_head.weight" not in list(stored.keys())


def test_an_untied_head_is_exported_too(make_engine, tmp_path):
    from transformers import AutoModelForCausalLM

    from quartet.testing.tiny import make_tiny_model

    engine = make_engine(model=make_tiny_model(tmp_path / "untied", tied=False), lr=1e-2)
    engine.train(step_of(SftLoss()), make_samples())
    export(engine, tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    trained = weights_of(engine)
    assert torch.equal(model.lm_head.weight, trained["lm_head.weight"])
    assert not torch.equal(trained["lm_head.weight"], trained["model.embed_tokens.weight"])


@pytest.mark.parametrize("prefix", ["score", "value_head"])
def test_a_scalar_head_keeps_its_name_and_weights(make_engine, tmp_path, prefix):
    engine = make_engine(head=Head.REWARD, value_head_prefix=prefix, lr=1e-2)
    engine.train(step_of(PairwiseLoss()), make_samples())
    export(engine, tmp_path / "rm")
    with safe_open(tmp_path / "rm" / "model.safetensors", "pt") as stored:
        assert f"{prefix}.weight" in list(stored.keys())
    config = json.loads((tmp_path / "rm" / "config.json").read_text())
    assert config["value_head_prefix"] == prefix
    assert config["architectures"] == ["LlamaForSequenceClassification"]
    # The name in config.json wins over the flag.
    again = make_engine(model=tmp_path / "rm", head=Head.REWARD, value_head_prefix="other")
    sequences = make_sequences()
    np.testing.assert_allclose(outputs(again, sequences), outputs(engine, sequences), atol=1e-6)
    if prefix == "score":
        scores = scores_by_transformers(tmp_path / "rm", sequences)
        np.testing.assert_allclose(outputs(engine, sequences), [s[-1] for s in scores], atol=1e-5)


def test_an_export_replaces_what_was_there_as_a_whole(make_engine, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "stale.safetensors").write_text("old")
    export(make_engine(), tmp_path / "out")
    assert not (tmp_path / "out" / "stale.safetensors").exists()
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_a_critic_learns_its_returns(make_engine):
    engine = make_engine(head=Head.VALUE, lr=1e-2)
    losses = [
        engine.train(step_of(ValueLoss(value_clip=None), n), make_samples()).metrics["critic_loss"]
        for n in range(10)
    ]
    assert losses[-1] < 0.5 * losses[0]


def test_a_reward_model_learns_its_pairs(make_engine):
    engine = make_engine(head=Head.REWARD, lr=1e-2)
    results = [engine.train(step_of(PairwiseLoss(), n), make_samples()) for n in range(10)]
    assert results[-1].metrics["acc"] == 1.0
    assert results[-1].metrics["loss"] < results[0].metrics["loss"]
    assert results[0].metrics["loss"] > math.log(2) * 0.9


def test_a_model_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError) as caught:
        load_model(LearnerSettings(model_name_or_path=str(tmp_path / "nowhere")))
    assert caught.value.info.field == "learner.model_name_or_path"
    assert "\n" not in str(caught.value)


def test_weights_that_are_not_finite_are_neither_pushed_nor_exported(make_engine, tmp_path):
    from quartet.weights import manifest_of_model

    engine = make_engine()
    manifest = manifest_of_model(engine.model.hf, bucket_bytes=16 << 10)
    whole = [(index, flat.numel()) for index, flat in engine.buckets(manifest)]
    with torch.no_grad():
        engine.model.hf.model.layers[0].mlp.up_proj.weight[0, 0] = math.nan
    seen = []
    with pytest.raises(FatalError, match="not finite"):
        seen.extend((index, flat.numel()) for index, flat in engine.buckets(manifest))
    # All buckets were there first: other ranks are in the same gathers.
    assert seen == whole
    assert len(seen) > 3
    with pytest.raises(FatalError, match="up_proj"):
        export(engine, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_buckets_hold_the_trained_weights(make_engine):
    from quartet.weights import manifest_of_model, plan_buckets, unpack_bucket

    engine = make_engine(zero_stage=3, lr=1e-2)
    engine.train(step_of(SftLoss()), make_samples())
    manifest = manifest_of_model(engine.model.hf, bucket_bytes=16 << 10)
    plan = plan_buckets(manifest)
    sent = {}
    for index, flat in engine.buckets(manifest):
        sent |= {name: t.clone() for name, t in unpack_bucket(plan[index], flat)}
    expected = weights_of(engine)
    assert sent.keys() == expected.keys()
    assert all(torch.equal(sent[name], weight) for name, weight in expected.items())
