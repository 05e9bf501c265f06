"""`quartet data preview`: what a data set becomes, before anything is trained on it.

Loads the tokenizer and the data by the flags of the method, and shows the first samples token by
token: what is trained stands out in colour on a terminal, and between « and » elsewhere. Then
lengths, and what was dropped and why.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

import numpy as np
from numpy.typing import NDArray

from quartet.config import DpoConfig, PpoConfig, RmConfig, SftConfig, TrainerConfig
from quartet.config.derive import longest_prompt
from quartet.data import (
    Built,
    PreferencePair,
    Prompt,
    Report,
    TokenSample,
    load_pairs,
    load_prompts,
    load_sft,
)
from quartet.trainer.inputs import policy_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TRAINED, OTHER = "bold green", "dim"
OPEN, CLOSE = "«", "»"


@dataclass(frozen=True, kw_only=True, slots=True)
class Shown:
    """One sequence as it will be trained."""

    title: str
    token_ids: NDArray[np.int32]
    """[T]"""
    mask: NDArray[np.bool_]
    """[T] which tokens are trained; all False for a prompt."""


def preview(config: TrainerConfig, *, samples: int, stream: TextIO) -> None:
    """Write the preview.

    Args:
        config: the method's flags; only those of model, data and lengths count.
        samples: how many to show in full.
        stream: where to. Colours only on a terminal.

    Raises:
        ConfigError: tokenizer or data are missing or of no use.
    """
    from rich.console import Console

    tokenizer = policy_tokenizer(config)
    rows, report, noun = _load(config, tokenizer)
    console = Console(file=stream, highlight=False, soft_wrap=True)
    for row in rows[:samples]:
        for shown in _shown(row):
            console.print(f"\n{shown.title}", markup=False, style="bold")
            console.print(_marked(shown, tokenizer, plain=not console.is_terminal))
    console.print("")
    for line in _summary(rows, report, noun):
        console.print(line, markup=False)


def _load(
    config: TrainerConfig, tokenizer: PreTrainedTokenizerFast
) -> tuple[Sequence[TokenSample | PreferencePair | Prompt], Report, str]:
    """Samples as the method loads them, what became of the rows, and what a sample is called."""
    seed = config.train.seed
    built: Built[TokenSample] | Built[PreferencePair] | Built[Prompt]
    match config:
        case SftConfig():
            pretrain = config.model.pretrain_mode_enable
            built = load_sft(config.data, tokenizer, seed=seed, pretrain=pretrain)
            return built.samples, built.report, "samples"
        case RmConfig() | DpoConfig():
            built = load_pairs(config.data, tokenizer, seed=seed)
            return built.samples, built.report, "pairs"
        case PpoConfig():
            built = load_prompts(
                config.data, tokenizer, max_prompt_tokens=longest_prompt(config), seed=seed
            )
            return built.samples, built.report, "prompts"


def _shown(row: TokenSample | PreferencePair | Prompt) -> Iterator[Shown]:
    match row:
        case TokenSample():
            yield _sequence(f"sample {row.sample_id}", row)
        case PreferencePair():
            margin = f", margin {row.margin:g}" if row.margin else ""
            yield _sequence(f"pair {row.pair_id}{margin}: chosen", row.chosen)
            yield _sequence(f"pair {row.pair_id}{margin}: rejected", row.rejected)
        case Prompt():
            ids = np.asarray(row.token_ids, dtype=np.int32)
            source = f", from {row.datasource}" if row.datasource != "default" else ""
            yield Shown(
                title=f"prompt {row.prompt_id}: {len(ids)} tokens, label {row.label!r}{source}",
                token_ids=ids,
                mask=np.zeros(len(ids), dtype=np.bool_),
            )


def _sequence(name: str, sample: TokenSample) -> Shown:
    trained = int(np.count_nonzero(sample.loss_mask))
    return Shown(
        title=f"{name}: {len(sample)} tokens, {trained} of them trained",
        token_ids=sample.token_ids,
        mask=sample.loss_mask,
    )


def _marked(shown: Shown, tokenizer: PreTrainedTokenizerFast, *, plain: bool):  # noqa: ANN202 - rich is imported late
    """The text with its trained stretches marked; stretches are decoded, so no character breaks."""
    from rich.text import Text

    text = Text()
    for trained, ids in stretches(shown):
        piece = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        if plain and trained:
            piece = f"{OPEN}{piece}{CLOSE}"
        text.append(str(piece), style=TRAINED if trained else OTHER)
    return text


def stretches(shown: Shown) -> Iterator[tuple[bool, list[int]]]:
    """Neighbouring tokens of one kind: (trained, token ids), in order."""
    ends = np.flatnonzero(np.diff(shown.mask.astype(np.int8))) + 1
    for part in np.split(np.arange(len(shown.mask)), ends):
        if len(part):
            yield bool(shown.mask[part[0]]), shown.token_ids[part].tolist()


def _summary(
    rows: Sequence[TokenSample | PreferencePair | Prompt], report: Report, noun: str
) -> Iterator[str]:
    sequences = [shown for row in rows for shown in _shown(row)]
    yield f"{report.source}: {report.rows} rows, {len(rows)} {noun}"
    yield f"tokens a sequence   {_spread([len(s.token_ids) for s in sequences])}"
    trained = [int(np.count_nonzero(s.mask)) for s in sequences]
    if any(trained):
        share = sum(trained) / sum(len(s.token_ids) for s in sequences)
        yield f"trained tokens      {_spread(trained)}; {share:.0%} of all tokens"
    yield from report.lines() or ["nothing was dropped or cut"]


def _spread(lengths: Sequence[int]) -> str:
    low, middle, high = np.percentile(lengths, [0, 50, 100])
    return f"{low:.0f} to {high:.0f}, median {middle:.0f}, {sum(lengths)} in all"
