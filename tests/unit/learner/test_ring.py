"""A row cut into slices, and attended in them, is the row attended whole."""

from __future__ import annotations

import itertools
import sys
import types
from dataclasses import replace

import pytest
import torch
from quartet_learner import ring as ring_module
from quartet_learner.ring import Ring
from quartet_learner.ring_attention import check_model, flash, kernel_of, sdpa, segments
from transformers import AutoModelForCausalLM

from quartet.errors import ConfigError
from quartet.nn import model_inputs
from quartet.nn.attention import causal_attention

from .steps import make_sequences

LENGTHS = (5, 9, 3, 12, 1)


def slices(size: int, **options) -> list[Ring]:
    """The rings of all ranks, the same row cut for each."""
    inputs = model_inputs(make_sequences(0, LENGTHS), packed=True, device="cpu")
    rings = [Ring(None, rank=rank, size=size, **options) for rank in range(size)]
    for each in rings:
        each.cut(inputs, torch.tensor([28, 3, 4, 20, 11, 29]))
    return rings


def test_slices_are_equal_and_hold_every_token():
    inputs = model_inputs(make_sequences(0, LENGTHS), packed=True, device="cpu")
    pieces = [each.current for each in slices(4)]
    assert {piece.width for piece in pieces} == {8}
    ids = torch.cat([piece.inputs.input_ids for piece in pieces], dim=1)
    assert torch.equal(ids[:, :30], inputs.input_ids)
    # Two tokens fill up the last slice, as a sequence of their own.
    assert pieces[3].inputs.position_ids[0, -2:].tolist() == [0, 1]
    assert pieces[0].bounds == (0, 5, 14, 17, 29, 30, 32)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_outputs_come_back_in_the_order_that_was_asked_for(size, monkeypatch):
    rings = slices(size)
    own = [(each.current.rows + each.current.start).double() for each in rings]
    longest = max(map(len, own))
    stacked = torch.cat([torch.nn.functional.pad(o, (0, longest - len(o))) for o in own])
    monkeypatch.setattr(ring_module, "_gathered", lambda *_: stacked)
    for each, mine in zip(rings, own, strict=True):
        mine.requires_grad_(True)
        joined = each.join(mine)
        assert joined.tolist() == [28, 3, 4, 20, 11, 29]
        # Each rank takes the gradient of its own outputs, once.
        (joined * torch.arange(6.0)).sum().backward()
        expected = torch.arange(6.0)[each.current.owners == each.rank]
        assert mine.grad is not None
        assert torch.equal(mine.grad, expected.double())


def test_every_query_is_attended_once():
    for size in (1, 2, 3, 4):
        for each in slices(size):
            parts = list(segments(each))
            assert [a for a, *_ in parts] == [0, *(b for _, b, *_ in parts[:-1])]
            assert parts[-1][1] == each.current.width


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize(("size", "stride"), [(1, 1), (2, 1), (2, 2), (3, 2)])
def test_slices_attend_as_the_whole_row_does(size, stride, window, monkeypatch):
    rings = slices(size, head_stride=stride)
    width = rings[0].current.width
    torch.manual_seed(0)
    q = torch.randn(width * size, 4, 8, dtype=torch.float64)
    k, v = torch.randn(2, width * size, 2, 8, dtype=torch.float64)
    bounds = rings[0].current.bounds
    lengths = [end - begin for begin, end in itertools.pairwise(bounds)]
    whole, _ = causal_attention(
        torch.nn.Module(),
        q.transpose(0, 1)[None],
        k.transpose(0, 1)[None],
        v.transpose(0, 1)[None],
        None,
        scaling=0.3,
        sliding_window=window,
        packed_lengths=lengths,
    )
    for each in rings:
        part = slice(each.current.start, each.current.start + width)
        taken = iter(range(0, 2, stride))

        def gather(_: torch.Tensor, heads=taken) -> torch.Tensor:
            first = next(heads)
            return torch.stack([t[:, first : first + stride] for t in (k, v)], dim=1)

        monkeypatch.setattr(each, "gather", gather)
        found = sdpa(each, q[part], k[part], v[part], 0.3, window)
        torch.testing.assert_close(found, whole[0, part])


def test_flash_attention_is_told_the_bounds_once_a_pass(monkeypatch):
    calls, prepared = [], []

    def prepare(bounds, causal, rank, size):
        prepared.append((bounds.tolist(), causal, rank, size))
        return "q", "k", 7, 8, slice(0, 9)

    def attend(query, key, value, **options):
        calls.append(options)
        return query

    package = types.ModuleType("ring_flash_attn")
    package.llama3_flash_attn_prepare_cu_seqlens = prepare  # pyright: ignore[reportAttributeAccessIssue]
    package.llama3_flash_attn_varlen_func = attend  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "ring_flash_attn", package)
    each = slices(2, head_stride=2)[1]
    q = torch.zeros(15, 4, 8)
    flash(each, q, q, q, 0.5, None)
    flash(each, q, q, q, 0.5, 4)
    assert prepared == [([0, 5, 14, 17, 29, 30], True, 1, 2)]
    assert [call["window_size"] for call in calls] == [(-1, -1), (3, 0)]
    assert calls[0]["cu_seqlens_q"] == "q"
    assert (calls[0]["max_seqlen_q"], calls[0]["max_seqlen_k"]) == (7, 8)
    assert (calls[0]["heads_k_stride"], calls[0]["softmax_scale"]) == (2, 0.5)
    assert calls[0]["local_k_slice"] == slice(0, 9)


def test_other_kernels_are_refused():
    assert kernel_of("flash_attention_2") is flash
    with pytest.raises(ConfigError) as caught:
        kernel_of("flash_attention_3")
    assert caught.value.info.field == "ds.attn_implementation"


@pytest.mark.parametrize(
    ("changes", "stride", "field"),
    [
        ({}, 1, None),
        ({}, 2, None),
        ({}, 3, "ds.ring_attn_head_stride"),
        ({"attn_logit_softcapping": 50.0}, 1, "ds.ring_attn_size"),
        ({"layer_types": ["linear_attention"]}, 1, "ds.ring_attn_size"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, 1, None),
    ],
)
def test_models_that_a_ring_cannot_hold_are_refused(tiny_model_dir, changes, stride, field):
    hf = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    for name, value in changes.items():
        setattr(hf.config, name, value)
    if field is None:
        check_model(hf, stride)
        return
    with pytest.raises(ConfigError) as caught:
        check_model(hf, stride)
    assert caught.value.info.field == field


def test_a_ring_without_a_row_says_so():
    with pytest.raises(RuntimeError, match="no row"):
        _ = Ring(None, rank=0, size=2).current
    assert replace(slices(1)[0].current, start=0).width == 30
