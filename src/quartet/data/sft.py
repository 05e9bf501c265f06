"""Texts of supervised fine-tuning and of continued pre-training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quartet.config.data import SftDataConfig
from quartet.data.load import Source, load_table, train_source
from quartet.data.report import Built, Dropped, Report
from quartet.data.samples import TokenSample, content_id
from quartet.data.templates import answer_spans, as_messages, check_templates, fill
from quartet.data.tokens import Spans, encode_with_mask, map_rows
from quartet.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def load_sft(
    data: SftDataConfig,
    tokenizer: PreTrainedTokenizerFast,
    *,
    seed: int,
    pretrain: bool = False,
    source: Source | None = None,
) -> Built[TokenSample]:
    """Read, render and tokenise texts to learn.

    Args:
        data: Keys and templates.
        tokenizer: The model's, with `data.tokenizer_chat_template` already in place.
        seed: Seed of a mix with shares.
        pretrain: Learn every token of the raw text in `input_key`.
        source: What to read; None is what `data` says.

    Raises:
        ConfigError: data set, column or template is missing, flags contradict each other, or no
            row is usable.
    """
    source = source or train_source(data)
    _check_flags(data, pretrain=pretrain)
    if not pretrain:
        check_templates(
            tokenizer,
            apply_chat_template=data.apply_chat_template,
            input_template=data.input_template,
        )
    table = load_table(source, seed=seed)
    table.require(data.input_key, "data.input_key")
    if data.output_key is not None and not pretrain:
        table.require(data.output_key, "data.output_key")
    make = _MakeSample(tokenizer, data, pretrain)
    report = Report(source=source.names, rows=len(table))
    samples = []
    rows = map_rows(make, table.rows, num_workers=data.dataloader_num_workers)
    for _, (sample, cut) in report.kept(rows):
        report.truncated += cut
        samples.append(sample)
    return Built(samples=samples, report=report).require_some(source.field)


def _check_flags(data: SftDataConfig, *, pretrain: bool) -> None:
    if pretrain:
        return
    if data.multiturn and not data.apply_chat_template:
        raise ConfigError(
            "--data.multiturn needs --data.apply_chat_template: turns are messages",
            field="data.multiturn",
            remedy="add --data.apply_chat_template",
        )
    if data.output_key is None and not data.apply_chat_template:
        raise ConfigError(
            "--data.output_key is not set, so there is no answer to learn",
            field="data.output_key",
            remedy="name the column of the answer, or use --data.apply_chat_template with messages",
        )


@dataclass(frozen=True, slots=True)
class _MakeSample:
    """Row -> (sample, whether it was cut), in whichever process."""

    tokenizer: PreTrainedTokenizerFast
    data: SftDataConfig
    pretrain: bool

    def __call__(self, row: Mapping[str, Any]) -> tuple[TokenSample, bool] | Dropped:
        rendered = self._rendered(row)
        if isinstance(rendered, Dropped):
            return rendered
        text, spans = rendered
        ids, mask, cut = encode_with_mask(self.tokenizer, text, spans, max_len=self.data.max_len)
        if not mask.any():
            return Dropped("nothing_to_learn", f"no answer within {self.data.max_len} tokens")
        sample = TokenSample(sample_id=content_id(text, spans), token_ids=ids, loss_mask=mask)
        return sample, cut

    def _rendered(self, row: Mapping[str, Any]) -> tuple[str, Spans] | Dropped:
        """Text and the spans in it that are to be learnt."""
        prompt = row.get(self.data.input_key)
        if self.pretrain:
            if not isinstance(prompt, str) or not prompt:
                return Dropped("empty_text")
            return prompt, [(0, len(prompt))]
        answer = row.get(self.data.output_key) if self.data.output_key is not None else None
        if self.data.apply_chat_template:
            return self._conversation(prompt, answer)
        if not isinstance(prompt, str) or not isinstance(answer, str):
            return Dropped("not_text", "messages need a chat template")
        return plain_answer(fill(self.data.input_template, prompt), answer)

    def _conversation(self, prompt: Any, answer: Any) -> tuple[str, Spans] | Dropped:
        messages = as_messages(prompt)
        if isinstance(messages, Dropped):
            return messages
        if self.data.output_key is not None:
            if not answer:
                return Dropped("empty_answer")
            reply = as_messages(answer, role="assistant")
            if isinstance(reply, Dropped):
                return reply
            messages = messages + reply
        return answer_spans(self.tokenizer, messages, every_turn=self.data.multiturn)


def plain_answer(prompt: str, answer: str) -> tuple[str, Spans] | Dropped:
    """Prompt and answer without a chat template; line ends behind the answer do not count."""
    answer = answer.rstrip("\n")
    if not prompt:
        return Dropped("empty_prompt")
    if not answer:
        return Dropped("empty_answer")
    text = prompt + answer
    return text, [(len(prompt), len(text))]
