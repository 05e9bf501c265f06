"""What a policy does, measured outside of training: other prompts, other code, another score.

Runs transformers directly, on the folders that the stages exported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from quartet.data import load_tokenizer
from quartet.demo.task import sentiment

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One measured completion."""

    prompt: str
    completion: str
    reward: float
    """By the reward model, normalised."""
    gold: float
    """By the lexicon."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """Means over completions of the held-out prompts."""

    reward: float
    """Reward model's score, normalised as in training."""
    gold: float
    """Lexicon score in [-1, 1], which no stage of training was given."""
    kl: float
    """KL(policy || SFT model) per token in nats, exact over the vocabulary."""
    entropy: float
    """Entropy per token in nats, exact."""
    length: float
    """Tokens of a completion, its end token included."""
    samples: tuple[Sample, ...]


def measure(
    policy: Path, *, reference: Path, reward_model: Path, prompts: Sequence[str], seed: int = 0
) -> Measurement:
    """Sample a completion of every prompt at temperature 1 and measure them.

    Args:
        policy: Folder of the model to measure.
        reference: Folder of the model that KL is measured against.
        reward_model: Folder of the reward model.
        prompts: Prompts.
        seed: Seed of the sampling.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = load_tokenizer(policy)
    model, base = (AutoModelForCausalLM.from_pretrained(p).eval() for p in (policy, reference))
    judge = AutoModelForSequenceClassification.from_pretrained(reward_model).eval()
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokens, mask, first = _complete(model, tokenizer, prompts)
        chosen = mask.clone()
        chosen[:, :first] = False  # completions alone
        position = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
        before = slice(first - 1, -1)  # the logits at t speak of token t + 1
        policy_logprobs = model(tokens, **position).logits[:, before].float().log_softmax(-1)
        base_logprobs = base(tokens, **position).logits[:, before].float().log_softmax(-1)
        weights = policy_logprobs.exp()
        where = chosen[:, first:]
        kl = (weights * (policy_logprobs - base_logprobs)).sum(-1)[where].mean()
        entropy = -(weights * policy_logprobs).sum(-1)[where].mean()
        rewards = _rewards(judge, tokens, mask, position["position_ids"])
    end = str(tokenizer.eos_token)
    texts = [
        str(tokenizer.decode(row[keep])).removesuffix(end)
        for row, keep in zip(tokens[:, first:], where, strict=True)
    ]
    samples = tuple(
        Sample(prompt=prompt, completion=text, reward=reward, gold=sentiment(text))
        for prompt, text, reward in zip(prompts, texts, rewards, strict=True)
    )
    return Measurement(
        reward=_mean([s.reward for s in samples]),
        gold=_mean([s.gold for s in samples]),
        kl=float(kl),
        entropy=float(entropy),
        length=float(where.sum(1).float().mean()),
        samples=samples,
    )


def _complete(
    model: object, tokenizer: PreTrainedTokenizerFast, prompts: Sequence[str]
) -> tuple[Tensor, Tensor, int]:
    """[B, T] tokens (prompts padded on the left), [B, T] bool mask, and where completions begin."""
    import torch

    rows = [tokenizer(prompt, add_special_tokens=False)["input_ids"] for prompt in prompts]
    first = max(map(len, rows))
    pad, eos = tokenizer.get_vocab()[str(tokenizer.pad_token)], tokenizer.eos_token_id
    ids = torch.tensor([[pad] * (first - len(row)) + list(row) for row in rows])
    prompt_mask = torch.tensor([[0] * (first - len(row)) + [1] * len(row) for row in rows])
    tokens = model.generate(  # type: ignore[attr-defined]
        ids,
        attention_mask=prompt_mask,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=24,
        pad_token_id=pad,
        eos_token_id=eos,
    )
    completion = tokens[:, first:]
    # Up to and with the first end token; what follows is padding.
    ends_before = (completion == eos).cumsum(1) - (completion == eos).long()
    return tokens, torch.cat([prompt_mask, (ends_before == 0).long()], 1).bool(), first


def _rewards(judge: object, tokens: Tensor, mask: Tensor, position_ids: Tensor) -> list[float]:
    """Normalised scores at each sequence's last token."""
    hidden = judge.model(  # type: ignore[attr-defined]
        tokens, attention_mask=mask, position_ids=position_ids
    ).last_hidden_state
    last = mask.long().cumsum(1).argmax(1)
    scores = judge.score(hidden[range(len(tokens)), last]).squeeze(-1)  # type: ignore[attr-defined]
    config = judge.config  # type: ignore[attr-defined]
    return ((scores - getattr(config, "mean", 0.0)) / getattr(config, "std", 1.0)).tolist()


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
