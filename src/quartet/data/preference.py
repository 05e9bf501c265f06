"""Pairs of a better and a worse answer, for reward models and for DPO."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quartet.config.data import PreferenceDataConfig
from quartet.data.load import Source, load_table, train_source
from quartet.data.report import Built, Dropped, Report
from quartet.data.samples import PreferencePair, TokenSample, content_id
from quartet.data.templates import answer_spans, as_messages, check_templates, fill
from quartet.data.tokens import Spans, encode_with_mask, map_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def load_pairs(
    data: PreferenceDataConfig,
    tokenizer: PreTrainedTokenizerFast,
    *,
    seed: int,
    source: Source | None = None,
) -> Built[PreferencePair]:
    """Read, render and tokenise pairs.

    With a chat template, answers are messages or text; without `prompt_key` each is a whole
    conversation whose last message is the answer. Without a chat template they are text, behind
    the prompt when there is a `prompt_key`. The column `margin` is used where it exists.

    Args:
        data: Keys and templates.
        tokenizer: The model's, with `data.tokenizer_chat_template` already in place.
        seed: Seed of a mix with shares.
        source: What to read; None is what `data` says.

    Raises:
        ConfigError: data set, column or template is missing, or no row is usable.
    """
    source = source or train_source(data)
    check_templates(
        tokenizer, apply_chat_template=data.apply_chat_template, input_template=data.input_template
    )
    table = load_table(source, seed=seed)
    table.require(data.chosen_key, "data.chosen_key")
    table.require(data.rejected_key, "data.rejected_key")
    if data.prompt_key is not None:
        table.require(data.prompt_key, "data.prompt_key")
    make = _MakePair(tokenizer, data)
    report = Report(source=source.names, rows=len(table))
    pairs = []
    rows = map_rows(make, table.rows, num_workers=data.dataloader_num_workers)
    for _, (pair, cut) in report.kept(rows):
        report.truncated += cut
        pairs.append(pair)
    return Built(samples=pairs, report=report).require_some(source.field)


@dataclass(frozen=True, slots=True)
class _MakePair:
    """Row -> (pair, whether an answer was cut), in whichever process."""

    tokenizer: PreTrainedTokenizerFast
    data: PreferenceDataConfig

    def __call__(self, row: Mapping[str, Any]) -> tuple[PreferencePair, bool] | Dropped:
        margin = row.get("margin")
        if margin is None:
            margin = 0.0
        if not isinstance(margin, int | float) or not math.isfinite(margin):
            return Dropped("bad_margin", f"{margin!r} is not a number")
        sides: list[TokenSample] = []
        any_cut = False
        for key in (self.data.chosen_key, self.data.rejected_key):
            made = self._side(row, key)
            if isinstance(made, Dropped):
                return made
            side, cut = made
            sides.append(side)
            any_cut |= cut
        chosen, rejected = sides
        if chosen.token_ids.tolist() == rejected.token_ids.tolist():
            return Dropped("same_answers", "chosen and rejected are the same tokens")
        pair_id = content_id(chosen.sample_id, rejected.sample_id)
        pair = PreferencePair(
            pair_id=pair_id, chosen=chosen, rejected=rejected, margin=float(margin)
        )
        return pair, any_cut

    def _side(self, row: Mapping[str, Any], key: str) -> tuple[TokenSample, bool] | Dropped:
        """One answer behind its prompt."""
        rendered = self._rendered(row, key)
        if isinstance(rendered, Dropped):
            return rendered
        text, spans = rendered
        ids, mask, cut = encode_with_mask(self.tokenizer, text, spans, max_len=self.data.max_len)
        if not mask.any():
            return Dropped("prompt_too_long", f"no answer within {self.data.max_len} tokens")
        sample = TokenSample(sample_id=content_id(text, spans), token_ids=ids, loss_mask=mask)
        return sample, cut

    def _rendered(self, row: Mapping[str, Any], key: str) -> tuple[str, Spans] | Dropped:
        answer = row.get(key)
        prompt = row.get(self.data.prompt_key) if self.data.prompt_key is not None else None
        if not answer:
            return Dropped("empty_answer", f"column {key!r}")
        if self.data.apply_chat_template:
            return self._conversation(prompt, answer)
        if not isinstance(answer, str):
            return Dropped("not_text", "messages need a chat template")
        answer = answer.rstrip("\n")
        if self.data.prompt_key is None:
            return (answer, [(0, len(answer))]) if answer else Dropped("empty_answer")
        if not isinstance(prompt, str):
            return Dropped("not_text", "messages need a chat template")
        before = fill(self.data.input_template, prompt)
        return before + answer, [(len(before), len(before + answer))]

    def _conversation(self, prompt: Any, answer: Any) -> tuple[str, Spans] | Dropped:
        reply = as_messages(answer, role="assistant")
        if isinstance(reply, Dropped) or self.data.prompt_key is None:
            messages = reply
        else:
            messages = as_messages(prompt)
            if not isinstance(messages, Dropped):
                messages = messages + reply
        if isinstance(messages, Dropped):
            return messages
        return answer_spans(self.tokenizer, messages, every_turn=False)
