"""What exists at the same time: never all tokens by the whole vocabulary."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from quartet.nn import LmHead, selective_logprobs, sequence_logprobs
from quartet.nn.logprobs import ROWS_PER_CHUNK
from quartet.types import SequenceBatch


class Watch(TorchDispatchMode):
    """Sees every tensor that any operation makes, forward and backward."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.largest = 0
        """Most rows of a tensor whose last dimension is the vocabulary."""
        self.live = self.peak = 0
        """Bytes of tensors that are there, and the most there ever were."""
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._note(tensor)
        return result

    def _note(self, tensor: torch.Tensor) -> None:
        if tensor.ndim > 1 and tensor.shape[-1] == self.vocabulary:
            self.largest = max(self.largest, tensor.numel() // self.vocabulary)
        place = tensor.untyped_storage().data_ptr()
        if place in self.seen or tensor._is_view():
            return
        self.seen.add(place)
        size = tensor.untyped_storage().nbytes()
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(tensor, self._gone, place, size)

    def _gone(self, place: int, size: int) -> None:
        self.seen.discard(place)
        self.live -= size


ROWS, WIDTH, VOCABULARY, CHUNK = 4096, 16, 1531, 128
WHOLE = ROWS * VOCABULARY * 4
"""Bytes of all logits in fp32."""


@pytest.mark.parametrize("with_entropy", [False, True])
def test_forward_and_backward_hold_a_few_chunks(with_entropy):
    torch.manual_seed(0)
    hidden = torch.randn(ROWS, WIDTH, requires_grad=True)
    weight = torch.randn(VOCABULARY, WIDTH, requires_grad=True)
    targets = torch.randint(0, VOCABULARY, (ROWS,))
    with Watch(VOCABULARY) as watch:
        logprobs, entropy = selective_logprobs(
            hidden,
            LmHead(weight=weight),
            targets,
            with_entropy=with_entropy,
            rows_per_chunk=CHUNK,
        )
        loss = logprobs.sum() if entropy is None else (logprobs + entropy).sum()
        forward_peak = watch.peak
        loss.backward()
    assert watch.largest == CHUNK
    chunk = CHUNK * VOCABULARY * 4
    assert forward_peak < 6 * chunk < WHOLE / 5
    assert watch.peak < 10 * chunk < WHOLE / 3


def test_the_watch_sees_the_plain_formula():
    """The test above can fail."""
    hidden = torch.randn(ROWS, WIDTH, requires_grad=True)
    weight = torch.randn(VOCABULARY, WIDTH, requires_grad=True)
    with Watch(VOCABULARY) as watch:
        (hidden @ weight.T).log_softmax(-1)[:, 0].sum().backward()
    assert watch.largest == ROWS
    assert watch.peak > 2 * WHOLE


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_a_models_own_head_is_never_run_on_all_tokens(tiny_model_dir, packed, with_entropy):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    rows = [[5 + i % 7] * 60 for i in range(40)]
    with Watch(model.config.vocab_size) as watch:
        logprobs, _ = sequence_logprobs(
            model, SequenceBatch.of(rows), packed=packed, with_entropy=with_entropy
        )
        logprobs.sum().backward()
    assert len(rows) * 60 > 2 * ROWS_PER_CHUNK
    assert 0 < watch.largest <= ROWS_PER_CHUNK
