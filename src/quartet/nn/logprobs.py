"""Log-probabilities of given tokens, without ever holding [N, vocabulary] in fp32.

Rows are taken in chunks. Without gradients that is free. With gradients a custom autograd function
keeps the hidden states and the logits of the last chunk, and computes those of the others a second
time in the backward pass: a third more time in the head for a row of many chunks, 12 to 25 times
less memory. Gradients take the place of the logits, so one chunk of them is all there ever is.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from quartet.nn.inputs import hidden_states, model_inputs

if TYPE_CHECKING:
    import torch

    from quartet.types import SequenceBatch

ROWS_PER_CHUNK = 1024
ROWS_PER_BLOCK = 32
"""Rows that a CPU sums at once: some megabytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LmHead:
    """The map from hidden states to logits: softcap((h @ weight.T + bias) * scale)."""

    weight: torch.Tensor
    """[vocabulary, hidden]."""
    bias: torch.Tensor | None = None
    """[vocabulary]."""
    scale: float = 1.0
    softcap: float | None = None
    """Logits become softcap * tanh(logits / softcap) (Gemma 2, arXiv:2408.00118)."""


def lm_head_of(model: Any) -> LmHead:
    """Read the head of a transformers causal language model, with its config's extras."""
    linear = model.get_output_embeddings()
    config = model.config.get_text_config()
    scale = float(getattr(config, "logit_scale", None) or 1.0)
    scale /= float(getattr(config, "logits_scaling", None) or 1.0)
    return LmHead(
        weight=linear.weight,
        bias=getattr(linear, "bias", None),
        scale=scale,
        softcap=getattr(config, "final_logit_softcapping", None),
    )


def selective_logprobs(
    hidden: torch.Tensor,
    head: LmHead,
    targets: torch.Tensor,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
    rows_per_chunk: int = ROWS_PER_CHUNK,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probability of `targets[i]` under softmax(logits(hidden[i]) / temperature).

    Args:
        hidden: [M, hidden]; M may be 0.
        head: map to logits.
        targets: [M] int64 token ids.
        temperature: divisor of the logits, above 0.
        with_entropy: also return the entropy of each distribution, in nats.
        rows_per_chunk: rows whose logits exist at the same time.

    Returns:
        [M] fp32 log-probabilities, and [M] fp32 entropies or None. Both are differentiable with
        respect to `hidden` and the head's parameters.
    """
    logprobs, entropy = _recomputing_function().apply(
        hidden,
        head.weight,
        head.bias,
        targets,
        (head.scale, head.softcap, temperature),
        with_entropy,
        rows_per_chunk,
    )
    return logprobs, entropy if with_entropy else None


def sequence_logprobs(
    model: Any,
    sequences: SequenceBatch,
    *,
    temperature: float = 1.0,
    packed: bool = False,
    with_entropy: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probability of every token given those before it, of one forward pass of `model`.

    Returns:
        [N] fp32 aligned with `sequences.token_ids`, 0 for the first token of a sequence; and the
        entropy of the distribution each token was taken from, or None.
    """
    import torch

    device = next(model.parameters()).device
    inputs = model_inputs(sequences, packed=packed, device=device)
    predicted = torch.from_numpy(predicted_tokens(sequences)).to(device)
    targets = torch.from_numpy(sequences.token_ids.astype(np.int64)).to(device)[predicted]
    hidden = hidden_states(model, inputs)[predicted - 1]
    logprobs, entropy = selective_logprobs(
        hidden, lm_head_of(model), targets, temperature=temperature, with_entropy=with_entropy
    )
    flat = torch.zeros(sequences.num_tokens, dtype=torch.float32, device=device)
    spread = flat.index_put((predicted,), logprobs)
    return spread, None if entropy is None else flat.index_put((predicted,), entropy)


def predicted_tokens(sequences: SequenceBatch) -> np.ndarray:
    """[M] int64 flat places of all tokens but the first of each sequence.

    The hidden state that predicts token t is that of place t - 1.
    """
    keep = np.ones(sequences.num_tokens, dtype=bool)
    keep[sequences.offsets[:-1]] = False
    return np.flatnonzero(keep)


@cache
def _recomputing_function() -> Any:
    """The autograd function, defined on first use because torch is not imported before."""
    import torch

    class SelectiveLogprobs(torch.autograd.Function):
        @staticmethod
        def forward(
            ctx: Any, hidden: Any, weight: Any, bias: Any, targets: Any, shape: Any, *rest: Any
        ) -> Any:
            with_entropy, rows = rest
            head = _Logits(weight, bias, shape, min(rows, len(hidden)))
            logits = None
            logprobs = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
            total = torch.empty_like(logprobs)
            entropy = torch.empty_like(logprobs) if with_entropy else None
            for part in _parts(len(hidden), rows):
                logits = head.of(hidden[part])
                total[part] = _logsumexp(logits)
                logprobs[part] = logits.gather(-1, targets[part, None]).squeeze(-1) - total[part]
                if entropy is not None:
                    mean = (logits.sub(total[part, None]).exp_() * logits).sum(-1)
                    entropy[part] = total[part] - mean
            ctx.save_for_backward(hidden, weight, bias, targets, total, entropy)
            ctx.shape, ctx.rows = shape, rows
            # Where the backward pass begins, the logits are there already.
            ctx.last = (head.buffer, logits) if any(ctx.needs_input_grad) else (None, None)
            ctx.set_materialize_grads(False)
            return logprobs, entropy

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            hidden, weight, bias, targets, total, entropy = ctx.saved_tensors
            needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
            d_hidden = torch.zeros_like(hidden) if needs_hidden else None
            # Summed in fp32: in bf16 each further chunk would lose bits.
            d_weight = torch.zeros(weight.shape, device=weight.device) if needs_weight else None
            d_bias = torch.zeros(len(weight), device=weight.device) if needs_bias else None
            buffer, logits = ctx.last
            ctx.last = (None, None)  # overwritten below: a second pass computes them
            head = _Logits(weight, bias, ctx.shape, min(ctx.rows, len(hidden)), buffer)
            for part in reversed(_parts(len(hidden), ctx.rows)):
                logits = head.of(hidden[part]) if logits is None else logits
                d_logits = _to_gradient(
                    logits,
                    targets[part],
                    total[part],
                    None if entropy is None else entropy[part],
                    [None if grad is None else grad[part] for grad in grads],
                    ctx.shape,
                ).to(weight.dtype)
                logits = None
                if d_hidden is not None:
                    d_hidden[part] = d_logits @ weight
                if d_weight is not None:
                    _add_product(d_weight, d_logits.T, hidden[part])
                if d_bias is not None:
                    d_bias += d_logits.sum(0)
            return (
                d_hidden,
                None if d_weight is None else d_weight.to(weight.dtype),
                None if d_bias is None or bias is None else d_bias.to(bias.dtype),
                *(None,) * 4,
            )

    return SelectiveLogprobs


class _Logits:
    """Computes the logits of one chunk after the other, all in one buffer.

    A fresh buffer for each chunk costs a CPU as much in page faults as its numbers do in sums.
    """

    def __init__(self, weight: Any, bias: Any, shape: Any, rows: int, buffer: Any = None) -> None:
        import torch

        self._weight, self._bias, self._shape = weight, bias, shape
        self.buffer = buffer
        if buffer is None:
            size = (rows, len(weight))
            self.buffer = torch.empty(size, dtype=torch.float32, device=weight.device)

    def of(self, hidden: Any) -> Any:
        """[rows, vocabulary] fp32 logits after scale, softcap and temperature; a view."""
        import torch

        scale, softcap, temperature = self._shape
        logits = self.buffer[: len(hidden)]
        if hidden.dtype == self._weight.dtype == torch.float32:
            torch.mm(hidden, self._weight.T, out=logits)
            if self._bias is not None:
                logits += self._bias
        else:
            logits.copy_(torch.nn.functional.linear(hidden, self._weight, self._bias))
        if scale != 1.0:
            logits *= scale
        if softcap is not None:
            logits.div_(softcap).tanh_().mul_(softcap)
        if temperature != 1.0:
            logits /= temperature
        return logits


def _parts(count: int, rows: int) -> list[slice]:
    return [slice(start, min(start + rows, count)) for start in range(0, count, rows)]


def _logsumexp(logits: Any) -> Any:
    """[rows]. On a CPU in blocks that stay in its cache: half the time."""
    import torch

    if logits.device.type != "cpu":
        return logits.logsumexp(-1)
    return torch.cat([block.logsumexp(-1) for block in logits.split(ROWS_PER_BLOCK)])


def _add_product(total: Any, left: Any, right: Any) -> None:
    """Add left @ right to `total`, in fp32."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


def _to_gradient(
    logits: Any, targets: Any, total: Any, entropy: Any, grads: Any, shape: Any
) -> Any:
    """Turn logits into the gradient with respect to the linear layer's raw output, in their place.

    With p = softmax(z): d logprob / dz = onehot - p and d entropy / dz = -p (log p + entropy).
    """
    scale, softcap, temperature = shape
    grad_logprobs, grad_entropy = grads
    slope = None
    if softcap is not None:
        slope = 1.0 - (logits * (temperature / softcap)) ** 2  # of tanh
    log_p = logits.sub_(total[:, None])
    if grad_entropy is None:
        out = log_p.exp_()
        out *= 0.0 if grad_logprobs is None else -grad_logprobs[:, None]
    else:
        p = log_p.exp()
        out = log_p.add_(entropy[:, None]).mul_(-grad_entropy[:, None])
        if grad_logprobs is not None:
            out -= grad_logprobs[:, None]
        out *= p
    if grad_logprobs is not None:
        out.scatter_add_(-1, targets[:, None], grad_logprobs[:, None])
    if temperature != 1.0:
        out /= temperature
    if slope is not None:
        out *= slope
    return out if scale == 1.0 else out.mul_(scale)
