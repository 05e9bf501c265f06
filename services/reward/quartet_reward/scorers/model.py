"""A reward model: a Hugging Face sequence classifier with one label.

Conventions of the incumbent: the reward is the scalar head's output at the last token; inputs are
cut on the right; the head's name is `value_head_prefix` of config.json; `mean` and `std` of
config.json normalise it when asked. The policy's token ids are read as they are when its tokenizer
is the model's own; otherwise the text is tokenized here.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from quartet.data.tokenizer import fingerprint_of, load_tokenizer
from quartet.errors import ConfigError, DataError, QuartetError
from quartet.nn.frozen import FrozenModel
from quartet.obs.metrics import CUT_INPUTS
from quartet.types import Failure, ScoreItem, SequenceBatch
from quartet_reward.answer import DEFAULT_MAX_ABS, read_answer
from quartet_reward.scorer import Job, Outcome, ScorerTraits

if TYPE_CHECKING:
    import torch

    from quartet.config.ds import HeadLoadConfig

logger = logging.getLogger(__name__)

MAX_BATCH_TOKENS = 16_384
"""Padded tokens of a forward pass."""
MAX_BATCH_ITEMS = 256


class ModelScorer:
    """Scores sequences with a reward model."""

    def __init__(
        self,
        name_or_path: str,
        load_config: HeadLoadConfig,
        *,
        max_len: int = 2048,
        batch_size: int | None = None,
        max_batch_tokens: int = MAX_BATCH_TOKENS,
        normalize: bool = False,
        offload: bool = False,
        use_fast_tokenizer: bool = True,
        max_abs: float = DEFAULT_MAX_ABS,
    ) -> None:
        """Say what to load; `start` loads it.

        Args:
            name_or_path: folder or hub id.
            load_config: dtype, attention, name of the head.
            max_len: tokens after which an input is cut.
            batch_size: most sequences of a forward pass; None leaves it to `max_batch_tokens`.
            max_batch_tokens: most padded tokens of a forward pass.
            normalize: give (x - mean) / std.
            offload: see `FrozenModel`.
            use_fast_tokenizer: see `load_tokenizer`.
            max_abs: see `read_answer`.
        """
        self._name = name_or_path
        self._load_config = load_config
        self._max_len = max_len
        self._batch_size = batch_size or MAX_BATCH_ITEMS
        self._max_batch_tokens = max_batch_tokens
        self._normalize = normalize
        self._use_fast_tokenizer = use_fast_tokenizer
        self._max_abs = max_abs
        self._model = FrozenModel(self._load, offload=offload, thread_name="reward-model")
        self._tokenizer: Any = None
        self._tokenizer_lock = asyncio.Lock()
        self._fingerprint = ""
        self._vocab_size = 0
        self._mean, self._std = 0.0, 1.0

    async def start(self) -> ScorerTraits:
        """Load tokenizer and model.

        Raises:
            ConfigError: there is none, its head is missing or has several labels, or normalisation
                is asked for and its config has no mean and std.
        """
        await self._model.start()
        return ScorerTraits(
            kind="model",
            digest=self._model.digest,
            model_name_or_path=self._name,
            tokenizer_fingerprint=self._fingerprint,
            max_sequence_length=self._max_len,
            normalizes=self._normalize,
            max_batch_items=self._batch_size,
            max_batch_cost=self._max_batch_tokens,
        )

    async def prepare(
        self, items: Sequence[ScoreItem], tokenizer_fingerprint: str
    ) -> list[Job | Failure]:
        """Find the tokens of each item."""
        same_tokenizer = tokenizer_fingerprint == self._fingerprint
        own = {
            index: item.token_ids
            for index, item in enumerate(items)
            if same_tokenizer and item.token_ids
        }
        texts = {index: item.query for index, item in enumerate(items) if index not in own}
        async with self._tokenizer_lock:  # a tokenizer is not safe to share between threads
            encoded = await asyncio.to_thread(self._encode, list(texts.values()))
        tokens = own | dict(zip(texts, encoded, strict=True))
        return [self._job(item, tokens[index]) for index, item in enumerate(items)]

    async def score(self, jobs: Sequence[Job]) -> list[Outcome]:
        """One forward pass."""
        sequences = SequenceBatch.of([job.token_ids for job in jobs])
        rewards = await self._model.run(lambda model: _forward(model, sequences))
        normalized = [(reward - self._mean) / self._std for reward in rewards]
        return read_answer({"rewards": normalized}, len(jobs), max_abs=self._max_abs)

    async def sleep(self) -> None:
        """Move the weights to main memory."""
        await self._model.sleep()

    async def wake(self) -> None:
        """Move them back."""
        await self._model.wake()

    async def stop(self) -> None:
        """Finish the pass under way."""
        await self._model.stop()

    def _load(self, device: torch.device) -> Any:
        """Runs in the model's thread."""
        self._tokenizer = load_tokenizer(
            self._name,
            use_fast=self._use_fast_tokenizer,
            trust_remote_code=self._load_config.trust_remote_code,
        )
        self._fingerprint = fingerprint_of(self._tokenizer)
        model = load_classifier(self._name, self._load_config, device)
        if self._normalize:
            self._mean, self._std = normalization_of(model.config)
        self._vocab_size = model.get_input_embeddings().num_embeddings
        longest = getattr(model.config, "max_position_embeddings", None)
        if longest is not None and longest < self._max_len:
            logger.warning(
                "data.max_len is %d, the reward model takes %d tokens: inputs are cut there",
                self._max_len,
                longest,
            )
            self._max_len = longest
        return model

    def _encode(self, texts: list[str]) -> list[tuple[int, ...]]:
        """Tokenize text that carries its special tokens, and end it with the end token.

        The end is normalised because reward models are trained on sequences that end in exactly
        one end token, and this is where the reward is read.
        """
        if not texts:
            return []
        tokenizer = self._tokenizer
        ended = [_strip(text, tokenizer) + tokenizer.eos_token for text in texts]
        return [tuple(ids) for ids in tokenizer(ended, add_special_tokens=False)["input_ids"]]

    def _job(self, item: ScoreItem, token_ids: tuple[int, ...]) -> Job | Failure:
        if max(token_ids) >= self._vocab_size or min(token_ids) < 0:
            message = f"a token id is outside the reward model's vocabulary of {self._vocab_size}"
            return Failure(error_class="DATA", reason="TOKEN_OUT_OF_RANGE", message=message)
        if len(token_ids) > self._max_len:
            CUT_INPUTS.inc()
            logger.info(
                "cut from %d to %d tokens [sample %s]",
                len(token_ids),
                self._max_len,
                item.sample_id,
            )
        return Job(item=item, token_ids=token_ids[: self._max_len])


def load_classifier(name_or_path: str, config: HeadLoadConfig, device: torch.device) -> Any:
    """Load a sequence classifier of one label, whatever its checkpoint calls the head.

    Raises:
        ConfigError: it cannot be loaded, or has no such head.
    """
    from transformers import AutoConfig, AutoModelForSequenceClassification

    from quartet.nn.loading import load_arguments, loading_error

    arguments = load_arguments(config, device)
    try:
        model_config = AutoConfig.from_pretrained(
            name_or_path, num_labels=1, trust_remote_code=config.trust_remote_code
        )
        prefix = getattr(model_config, "value_head_prefix", None) or config.value_head_prefix
        model, loaded = AutoModelForSequenceClassification.from_pretrained(
            name_or_path,
            config=model_config,
            key_mapping={rf"^{re.escape(prefix)}\.": "score."},
            output_loading_info=True,
            **arguments,
        )
    except QuartetError:
        raise
    except (OSError, ValueError, RuntimeError, KeyError, ImportError) as error:
        raise loading_error(error, name_or_path, "reward.model_name_or_path") from error
    if missing := sorted(loaded["missing_keys"]):
        raise ConfigError(
            f"{name_or_path!r} is no reward model with a head {prefix!r}: it lacks {missing[0]}",
            reason="HEAD_NOT_FOUND",
            field="reward.model_name_or_path",
            value=name_or_path,
            remedy="train one (quartet train rm), or name its head with --ds.value_head_prefix",
        )
    return model


def normalization_of(model_config: Any) -> tuple[float, float]:
    """`mean` and `std` of a reward model's config.json.

    Raises:
        ConfigError: they are not there, or not usable.
    """
    mean, std = getattr(model_config, "mean", None), getattr(model_config, "std", None)
    numbers = [value for value in (mean, std) if isinstance(value, int | float)]
    if len(numbers) < 2 or not all(map(math.isfinite, numbers)) or numbers[1] <= 0:
        raise ConfigError(
            f"reward.normalize_enable needs mean and std (above 0) in the reward model's "
            f"config.json, which says mean={mean}, std={std}",
            field="reward.normalize_enable",
            remedy="leave the flag out, or add the two numbers to config.json",
        )
    return float(numbers[0]), float(numbers[1])


def _forward(model: Any, sequences: SequenceBatch) -> list[float]:
    """Head output at the last token of each sequence, in fp32."""
    import torch

    from quartet.nn import hidden_states, model_inputs

    inputs = model_inputs(sequences, packed=False, device=model.device)
    last = torch.as_tensor(sequences.offsets[1:] - 1, device=model.device)
    try:
        hidden = hidden_states(model, inputs).index_select(0, last)
    except torch.cuda.OutOfMemoryError as error:
        torch.cuda.empty_cache()
        raise DataError(
            f"no device memory for {len(sequences)} x {sequences.lengths.max()} tokens",
            reason="OUT_OF_MEMORY",
        ) from error
    head = model.score
    bias = None if head.bias is None else head.bias.float()
    return torch.nn.functional.linear(hidden.float(), head.weight.float(), bias)[:, 0].tolist()


def _strip(text: str, tokenizer: Any) -> str:
    """Text without padding and end tokens at its two ends."""
    ends = "|".join(re.escape(token) for token in {tokenizer.pad_token, tokenizer.eos_token})
    return re.sub(rf"^(?:{ends})+|(?:{ends})+$", "", text)
