"""Attention without masks gives what transformers gives with them, model by model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from quartet.errors import FatalError
from quartet.nn import hidden_states, model_inputs
from quartet.nn.attention import NAME, causal_attention, use_causal_attention
from quartet.types import SequenceBatch

LENGTHS = (9, 1, 4, 13)
BASE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": BASE | HEADS,
    "qwen2": BASE
    | HEADS
    | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "qwen3": BASE | HEADS | {"head_dim": 8},
    "mistral": BASE | HEADS | {"sliding_window": 6},
    "phi3": BASE | HEADS,
    "olmo2": BASE | HEADS,
    "gemma3_text": BASE | HEADS | {"head_dim": 8, "sliding_window": 4},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": 32}
    | {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "gpt_neox": BASE | {"num_attention_heads": 4},
    "opt": {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "vocab_size": 64}
    | {"num_attention_heads": 4, "word_embed_proj_dim": 32, "dropout": 0.0},
    "mixtral": BASE | HEADS | {"num_local_experts": 4, "num_experts_per_tok": 2},
}


def tiny(family: str, **more: Any) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **(FAMILIES.get(family, BASE | HEADS) | more))
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()


@pytest.fixture
def sequences() -> SequenceBatch:
    random = np.random.default_rng(0)
    return SequenceBatch(
        token_ids=random.integers(1, 64, sum(LENGTHS)).astype(np.int32),
        lengths=np.array(LENGTHS, np.int32),
    )


def outputs_and_gradient(
    model: Any, sequences: SequenceBatch, *, packed: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    model.zero_grad()
    hidden = hidden_states(model, model_inputs(sequences, packed=packed, device="cpu"))
    (hidden * torch.linspace(0.5, 1.5, hidden.numel()).view_as(hidden)).sum().backward()
    gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return hidden.detach(), torch.cat(gradients)


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_it_gives_what_masks_give(family: str, packed: bool, sequences: SequenceBatch) -> None:
    """Those of padded rows: opt does not tell transformers' masks where a packed row is cut."""
    model = tiny(family)
    expected = outputs_and_gradient(model, sequences, packed=False)
    assert use_causal_attention(model)
    assert model.config._attn_implementation == NAME
    found = outputs_and_gradient(model, sequences, packed=packed)
    for got, wanted in zip(found, expected, strict=True):
        assert torch.linalg.norm(got - wanted) <= 2e-6 * torch.linalg.norm(wanted)


def test_sequences_of_a_packed_row_do_not_see_each_other(sequences: SequenceBatch) -> None:
    model = tiny("llama")
    use_causal_attention(model)
    hidden, _ = outputs_and_gradient(model, sequences, packed=True)
    changed = sequences.token_ids.copy()
    changed[: LENGTHS[0]] = 7  # the whole first sequence
    other = SequenceBatch(token_ids=changed, lengths=sequences.lengths)
    moved, _ = outputs_and_gradient(model, other, packed=True)
    assert torch.equal(hidden[LENGTHS[0] :], moved[LENGTHS[0] :])
    assert not torch.equal(hidden[: LENGTHS[0]], moved[: LENGTHS[0]])


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_nothing(reentrant: bool, sequences: SequenceBatch) -> None:
    model = tiny("llama")
    use_causal_attention(model)
    expected = outputs_and_gradient(model, sequences, packed=True)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    found = outputs_and_gradient(model, sequences, packed=True)
    torch.testing.assert_close(found, expected)


def test_a_model_with_a_scalar_head_has_it_too(sequences: SequenceBatch) -> None:
    config = AutoConfig.for_model("llama", **FAMILIES["llama"], num_labels=1)
    model = AutoModelForSequenceClassification.from_config(config, attn_implementation="sdpa")
    expected, _ = outputs_and_gradient(model, sequences, packed=True)
    assert use_causal_attention(model)
    found, _ = outputs_and_gradient(model, sequences, packed=True)
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)


def test_no_mask_is_made(sequences: SequenceBatch, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama")
    use_causal_attention(model)
    calls: list[Any] = []
    kernel = torch.nn.functional.scaled_dot_product_attention

    def record(*args: Any, **kwargs: Any) -> Any:
        calls.append((args[0].shape[2], kwargs["attn_mask"]))
        return kernel(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", record)
    outputs_and_gradient(model, sequences, packed=True)
    assert calls == [(length, None) for length in LENGTHS] * 2  # layers


@pytest.mark.parametrize("how", ["eager", "other layers", "no keyword arguments"])
def test_what_it_cannot_do_is_left_alone(how: str) -> None:
    model = tiny("llama")
    if how == "eager":
        model.set_attn_implementation("eager")
    elif how == "other layers":
        model.config.layer_types = ["chunked_attention", "full_attention"]
    elif how == "no keyword arguments":
        model.base_model.forward = lambda input_ids: input_ids
    before = model.config._attn_implementation
    assert not use_causal_attention(model)
    assert model.config._attn_implementation == before


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({}, "does not say which rows are packed"),
        ({"packed_lengths": (), "softcap": 30.0}, "softcap"),
        ({"packed_lengths": (), "is_causal": False}, "is_causal"),
        ({"packed_lengths": (), "attention_mask": torch.ones(2, 2)}, "attention_mask"),
    ],
)
def test_a_call_that_means_something_else_is_an_error(wrong: dict[str, Any], named: str) -> None:
    one = torch.zeros(1, 1, 2, 4)
    mask = wrong.pop("attention_mask", None)
    with pytest.raises(FatalError, match=named):
        causal_attention(torch.nn.Identity(), one, one, one, mask, **wrong)
