"""Weights as a folder that others open."""

import json

import pytest
import torch
from quartet_rollout.engines.openai.folder import written
from transformers import AutoModelForCausalLM, AutoTokenizer


@pytest.mark.parametrize("shard_bytes", [1 << 30, 40_000])
def test_transformers_opens_it(shard_bytes, tiny_model_dir, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    with torch.no_grad():
        model.get_input_embeddings().weight += 1.0
    # As a push brings them: views of one buffer.
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    views, at = [], 0
    for name, parameter in model.named_parameters():
        views.append((name, flat[at : at + parameter.numel()].view(parameter.shape)))
        at += parameter.numel()
    with written(
        iter(views), like=tiny_model_dir, parent=str(tmp_path / "a" / "b"), shard_bytes=shard_bytes
    ) as folder:
        again = AutoModelForCausalLM.from_pretrained(folder)
        assert AutoTokenizer.from_pretrained(folder).eos_token_id is not None
        shards = list(folder.glob("*.safetensors"))
        assert len(shards) == 1 if shard_bytes > 1 << 20 else len(shards) > 2
        if len(shards) > 1:
            index = json.loads((folder / "model.safetensors.index.json").read_text())
            assert index["weight_map"].keys() == {name for name, _ in views}
        for name, parameter in again.named_parameters():
            assert torch.equal(parameter, model.get_parameter(name))
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_nothing_is_left_of_a_failure(tiny_model_dir, tmp_path):
    with (
        pytest.raises(RuntimeError),
        written([("w", torch.zeros(2))], like=tiny_model_dir, parent=str(tmp_path)),
    ):
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
