"""A running batch: sequences join and leave it between two tokens.

One step samples one token of every row. Sequences without keys and values (new ones, and all of
them after the weights changed) run whole; those that already run feed their last token. Nothing
here knows of threads, callers or clocks: the same sequences added in the same order give the same
steps, bit for bit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import torch

from quartet.types import Failure, LogprobKind
from quartet_rollout.engines.transformers import sampler
from quartet_rollout.engines.transformers.cache import BatchCache
from quartet_rollout.engines.transformers.model import CausalLm
from quartet_rollout.engines.transformers.sequence import Sequence as Sample

PREFILL_TOKENS = 8192
"""Most tokens, padding included, of one forward pass over whole sequences."""


class Batch:
    """Sequences that run together, and a queue of those that wait for a row."""

    def __init__(self, model: CausalLm, *, max_rows: int, replica: str = "") -> None:
        self._model = model
        self._max_rows = max_rows
        self._replica = replica
        self._cache = BatchCache()
        self._running: list[Sample] = []  # row i of the cache is sequence i
        self._waiting: deque[Sample] = deque()

    def __len__(self) -> int:
        """Sequences that run or wait."""
        return len(self._running) + len(self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences that have a row."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for one."""
        return len(self._waiting)

    def add(self, samples: Iterable[Sample]) -> None:
        """Queue sequences; they join in this order."""
        self._waiting.extend(samples)

    def step(self, policy_version: int, *, admit: bool = True) -> int:
        """Sample one token of every sequence that has a row.

        Args:
            policy_version: Version of the weights, noted with each token.
            admit: Let waiting sequences join.

        Returns:
            Tokens sampled.
        """
        self.drop_done()
        decoded = list(self._running)
        count = 0
        if decoded:
            logits = self._model.decode([s.tokens[-1] for s in decoded], self._cache)
            count += self._sample(decoded, logits, policy_version)
        if admit:
            while joining := self._next_to_join():
                count += self._join(joining, policy_version)
        self.drop_done()
        return count

    def drop_done(self) -> None:
        """Free the rows of sequences that are done or cancelled."""
        for row in reversed(range(len(self._running))):
            if self._running[row].is_done:
                self._cache.remove(row)
                last = self._running.pop()
                if row < len(self._running):
                    self._running[row] = last
        if any(s.is_done for s in self._waiting):
            self._waiting = deque(s for s in self._waiting if not s.is_done)

    def forget_cache(self) -> int:
        """Drop all keys and values; running sequences run whole again before all others.

        Returns:
            Sequences that were running.
        """
        self.drop_done()
        self._cache.clear()
        self._waiting.extendleft(reversed(self._running))
        count, self._running = len(self._running), []
        return count

    def abort(self) -> list[Sample]:
        """End all that have begun, with the tokens so far; those that wait go on waiting."""
        ended = [s for s in (*self._running, *self._waiting) if s.tokens and not s.is_done]
        for sample in ended:
            sample.abort()
        self.drop_done()
        return ended

    def _next_to_join(self) -> list[Sample]:
        """Waiting sequences for one forward pass: as many as rows and tokens allow."""
        joining: list[Sample] = []
        longest = 0
        prompts: set[tuple[int, ...]] = set()
        while self._waiting and len(self._running) + len(joining) < self._max_rows:
            tokens = tuple(self._waiting[0].all_tokens())
            longest_then = max(longest, len(tokens))
            if joining and longest_then * len(prompts | {tokens}) > PREFILL_TOKENS:
                break
            joining.append(self._waiting.popleft())
            longest = longest_then
            prompts.add(tokens)
        return joining

    def _join(self, joining: Sequence[Sample], policy_version: int) -> int:
        """Run whole sequences once each, whatever the number of samples that share them."""
        rows: dict[tuple[int, ...], list[Sample]] = {}
        for sample in joining:
            rows.setdefault(tuple(sample.all_tokens()), []).append(sample)
        filled = self._model.prefill(list(rows))
        place: dict[Sample, int] = {}
        for row, (tokens, samples) in enumerate(rows.items()):
            layers = [(keys[row], values[row]) for keys, values in filled.layers]
            self._cache.add(layers, len(tokens), len(samples))
            self._running.extend(samples)
            place |= dict.fromkeys(samples, row)
        ordered = [s for samples in rows.values() for s in samples]
        logits = filled.logits[[place[s] for s in ordered]]
        return self._sample(ordered, logits, policy_version)

    def _sample(self, samples: Sequence[Sample], logits: torch.Tensor, policy_version: int) -> int:
        device = logits.device
        noise = sampler.uniforms([(s.seed, len(s.tokens)) for s in samples], device)
        params = _sampling_tensors(samples, logits)
        drawn = sampler.sample(logits, params, noise, _banned(samples, logits))
        tokens, logprobs = drawn.tokens.tolist(), drawn.logprobs.tolist()
        count = 0
        for sample, ok, token, logprob in zip(
            samples, drawn.is_finite.tolist(), tokens, logprobs, strict=True
        ):
            if ok:
                sample.take(token, logprob, policy_version)
                count += 1
            else:
                sample.failure = self._not_finite(sample)
        return count

    def _not_finite(self, sample: Sample) -> Failure:
        return Failure(
            error_class="DATA",
            reason="LOGITS_NOT_FINITE",
            message=f"the model gave no finite distribution for token {len(sample.tokens)} of "
            f"sample {sample.sample_id or '(unnamed)'}",
            replica=self._replica,
        )


def _sampling_tensors(samples: Sequence[Sample], logits: torch.Tensor) -> sampler.SamplingTensors:
    device, vocabulary = logits.device, logits.shape[-1]

    def column(values: list[float], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    kept = [s.sampling.top_k for s in samples]
    return sampler.SamplingTensors(
        temperature=column([s.sampling.temperature for s in samples], torch.float32),
        top_p=column([s.sampling.top_p for s in samples], torch.float32),
        top_k=column([k if 0 < k < vocabulary else vocabulary for k in kept], torch.int64),
        is_raw=column([s.logprob_kind is LogprobKind.RAW for s in samples], torch.bool),
    )


def _banned(samples: Sequence[Sample], logits: torch.Tensor) -> torch.Tensor | None:
    """[B, V] stop tokens of the rows that must go on; None when there are none."""
    pairs = [
        (row, token)
        for row, sample in enumerate(samples)
        if sample.must_go_on
        for token in sample.stop_ids
        if token < logits.shape[-1]
    ]
    if not pairs:
        return None
    banned = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device)
    rows, tokens = zip(*pairs, strict=True)
    banned[list(rows), list(tokens)] = True
    return banned
