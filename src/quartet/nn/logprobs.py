"""Log-probabilities of given tokens, without ever holding [N, vocabulary] in fp32.

Rows are taken in chunks. Without gradients that is free. With gradients a custom autograd function
keeps only the hidden states and computes the logits of each chunk a second time in the backward
pass: about a third more time in the head, 12 to 25 times less memory.
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
            logprobs = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
            entropy = torch.empty_like(logprobs) if with_entropy else None
            for start in range(0, len(hidden), rows):
                part = slice(start, start + rows)
                logits, _ = _scaled_logits(hidden[part], weight, bias, shape)
                total = logits.logsumexp(-1)
                picked = logits.gather(-1, targets[part, None]).squeeze(-1)
                logprobs[part] = picked - total
                if entropy is not None:
                    mean = (logits.sub(total[:, None]).exp_() * logits).sum(-1)
                    entropy[part] = total - mean
            ctx.save_for_backward(hidden, weight, bias, targets)
            ctx.shape, ctx.rows = shape, rows
            ctx.set_materialize_grads(False)
            return logprobs, entropy

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            hidden, weight, bias, targets = ctx.saved_tensors
            grad_logprobs, grad_entropy = grads
            needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
            d_hidden = torch.zeros_like(hidden) if needs_hidden else None
            # Summed in fp32: in bf16 each further chunk would lose bits.
            d_weight = torch.zeros(weight.shape, device=weight.device) if needs_weight else None
            d_bias = torch.zeros(len(weight), device=weight.device) if needs_bias else None
            for start in range(0, len(hidden), ctx.rows):
                part = slice(start, start + ctx.rows)
                d_logits = _logits_gradient(
                    _scaled_logits(hidden[part], weight, bias, ctx.shape),
                    targets[part],
                    None if grad_logprobs is None else grad_logprobs[part],
                    None if grad_entropy is None else grad_entropy[part],
                    ctx.shape,
                ).to(weight.dtype)
                if d_hidden is not None:
                    d_hidden[part] = d_logits @ weight
                if d_weight is not None:
                    d_weight += d_logits.T @ hidden[part]
                if d_bias is not None:
                    d_bias += d_logits.sum(0)
            return (
                d_hidden,
                None if d_weight is None else d_weight.to(weight.dtype),
                None if d_bias is None or bias is None else d_bias.to(bias.dtype),
                *(None,) * 4,
            )

    return SelectiveLogprobs


def _scaled_logits(hidden: Any, weight: Any, bias: Any, shape: Any) -> tuple[Any, Any]:
    """Fp32 logits after scale, softcap and temperature, and tanh of the softcap or None."""
    import torch

    scale, softcap, temperature = shape
    logits = torch.nn.functional.linear(hidden, weight, bias).float()
    if scale != 1.0:
        logits = logits * scale
    capped = None
    if softcap is not None:
        capped = torch.tanh(logits / softcap)
        logits = capped * softcap
    return (logits / temperature if temperature != 1.0 else logits), capped


def _logits_gradient(
    logits_and_cap: Any, targets: Any, grad_logprobs: Any, grad_entropy: Any, shape: Any
) -> Any:
    """Gradient with respect to the raw output of the linear layer, [rows, vocabulary] fp32.

    With p = softmax(z): d logprob / dz = onehot - p and d entropy / dz = -p (log p + entropy).
    """
    import torch

    logits, capped = logits_and_cap
    scale, softcap, temperature = shape
    log_p = logits.log_softmax(-1)
    p = log_p.exp()
    out = torch.zeros_like(p)
    if grad_logprobs is not None:
        out -= p * grad_logprobs[:, None]
        out.scatter_add_(-1, targets[:, None], grad_logprobs[:, None])
    if grad_entropy is not None:
        entropy = -(p * log_p).sum(-1, keepdim=True)
        out -= grad_entropy[:, None] * p * (log_p + entropy)
    if temperature != 1.0:
        out /= temperature
    if softcap is not None:
        out *= 1.0 - capped * capped
    return out * scale if scale != 1.0 else out
