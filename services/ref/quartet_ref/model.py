"""The frozen model: log-probabilities of given tokens, a micro-batch at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from quartet.config import RefServeConfig
from quartet.data.tokenizer import fingerprint
from quartet.errors import ConfigError, DataError, QuartetError, RequestError
from quartet.nn import sequence_logprobs
from quartet.nn.frozen import FrozenModel
from quartet.nn.loading import load_arguments, loading_error
from quartet.obs.metrics import REF_TOKENS
from quartet.types import ComputeLogprobsRequest, SequenceBatch

if TYPE_CHECKING:
    import torch

MAX_TOKENS = 16_384
"""Tokens of a forward pass, padding counted, when the caller does not say."""


class RefModel:
    """A causal language model that never changes.

    Each forward pass is a piece of work of its own in the model's thread, so the passes of
    concurrent callers take turns.
    """

    def __init__(self, config: RefServeConfig) -> None:
        """Say what to load; `start` loads it.

        Raises:
            ConfigError: no model is named.
        """
        if not config.ref.model_name_or_path:
            raise ConfigError(
                "there is no model to load",
                field="ref.model_name_or_path",
                remedy="give --ref.model_name_or_path FOLDER",
            )
        self.name_or_path = config.ref.model_name_or_path
        self.tokenizer_fingerprint = ""
        """Of the model's tokenizer; empty when the folder has none, which a ref does not need."""
        self.max_sequence_length = config.data.max_len
        self._config = config
        self._packed = config.ds.packing_samples
        self._vocab_size = 0
        self._model = FrozenModel(self._load, offload=config.ref.offload, thread_name="ref-model")

    @property
    def digest(self) -> str:
        """Digest of the weights as loaded."""
        return self._model.digest

    async def start(self) -> None:
        """Load. Raises ConfigError when there is no such model."""
        await self._model.start()

    async def compute(self, request: ComputeLogprobsRequest) -> NDArray[np.float32]:
        """Log-probability of every token given those before it.

        Returns:
            [N] aligned with the tokens, 0 for the first token of a sequence.

        Raises:
            RequestError: a sequence is too long, or has a token that the model does not know.
            DataError: a log-probability is not finite.
            StateError: the model is asleep.
        """
        sequences = request.sequences
        self._check(sequences)
        offsets = sequences.offsets
        logprobs = np.zeros(sequences.num_tokens, np.float32)
        budget = request.max_tokens_per_micro_batch or MAX_TOKENS
        for members in micro_batches(sequences.lengths, budget, packed=self._packed):
            places = np.concatenate([np.arange(offsets[i], offsets[i + 1]) for i in members])
            batch = SequenceBatch(
                token_ids=sequences.token_ids[places], lengths=sequences.lengths[members]
            )
            logprobs[places] = await self._forward(batch, request.temperature)
        _check_finite(logprobs, sequences)
        REF_TOKENS.inc(sequences.num_tokens)
        return logprobs

    async def sleep(self) -> None:
        """Move the weights to main memory."""
        await self._model.sleep()

    async def wake(self) -> None:
        """Move them back."""
        await self._model.wake()

    async def stop(self) -> None:
        """Finish the pass under way."""
        await self._model.stop()

    async def _forward(self, batch: SequenceBatch, temperature: float) -> NDArray[np.float32]:
        def work(model: Any) -> NDArray[np.float32]:
            logprobs, _ = sequence_logprobs(
                model, batch, temperature=temperature, packed=self._packed
            )
            return logprobs.cpu().numpy()

        return await self._model.run(work)

    def _load(self, device: torch.device) -> Any:
        """Runs in the model's thread."""
        import torch
        from transformers import AutoModelForCausalLM

        if self._config.train.full_determinism_enable:
            torch.use_deterministic_algorithms(True)
        arguments = load_arguments(self._config.ds, device)
        try:
            model: Any = AutoModelForCausalLM.from_pretrained(self.name_or_path, **arguments)
        except QuartetError:
            raise
        except (OSError, ValueError, RuntimeError, KeyError, ImportError) as error:
            raise loading_error(error, self.name_or_path, "ref.model_name_or_path") from error
        self._vocab_size = int(model.get_input_embeddings().weight.shape[0])
        longest = getattr(model.config, "max_position_embeddings", None)
        self.max_sequence_length = min(self.max_sequence_length, longest or 1 << 62)
        try:
            self.tokenizer_fingerprint = fingerprint(self.name_or_path)
        except ConfigError:
            self.tokenizer_fingerprint = ""
        return model

    def _check(self, sequences: SequenceBatch) -> None:
        longest = int(sequences.lengths.max(initial=0))
        if longest > self.max_sequence_length:
            index = int(sequences.lengths.argmax())
            raise RequestError(
                f"a sequence has {longest} tokens, and this model takes {self.max_sequence_length}",
                reason="SEQUENCE_TOO_LONG",
                field="sequences.lengths",
                value=str(longest),
                remedy="send shorter sequences, or serve with a larger --data.max_len",
                sample_id=_sample_id(sequences, index),
            )
        unknown = (sequences.token_ids < 0) | (sequences.token_ids >= self._vocab_size)
        if unknown.any():
            place = int(unknown.argmax())
            raise RequestError(
                f"token id {sequences.token_ids[place]} is outside the vocabulary of "
                f"{self._vocab_size}",
                reason="TOKEN_OUT_OF_RANGE",
                field="sequences.token_ids",
                value=str(sequences.token_ids[place]),
                remedy="use the tokenizer of this model",
                sample_id=_sample_id(sequences, _sequence_of(sequences, place)),
            )


def micro_batches(
    lengths: Sequence[int] | NDArray[np.int32], max_tokens: int, *, packed: bool
) -> Iterator[list[int]]:
    """Cut sequences into forward passes of at most `max_tokens` tokens.

    Longest first, so that memory runs out at once or never, and equals meet, so little is padded.
    A sequence that alone is longer than the budget is a pass of its own.

    Yields:
        Indices of the sequences of one pass.
    """
    members: list[int] = []
    total = 0
    for index in np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable").tolist():
        # Padded, each row costs as much as the longest, which is the first.
        cost = int(lengths[index] if packed or not members else lengths[members[0]])
        if members and total + cost > max_tokens:
            yield members
            members, total, cost = [], 0, int(lengths[index])
        members.append(index)
        total += cost
    if members:
        yield members


def _check_finite(logprobs: NDArray[np.float32], sequences: SequenceBatch) -> None:
    wrong = ~np.isfinite(logprobs)
    if wrong.any():
        place = int(wrong.argmax())
        index = _sequence_of(sequences, place)
        token = place - int(sequences.offsets[index])
        raise DataError(
            f"the log-probability of token {token} of sequence {index} is {logprobs[place]}",
            reason="NOT_FINITE",
            sample_id=_sample_id(sequences, index),
        )


def _sequence_of(sequences: SequenceBatch, place: int) -> int:
    return int(np.searchsorted(sequences.offsets, place, side="right")) - 1


def _sample_id(sequences: SequenceBatch, index: int) -> str:
    return sequences.sample_ids[index] if sequences.sample_ids else ""
