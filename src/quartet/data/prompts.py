"""Prompts of online training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quartet.config.data import PromptDataConfig
from quartet.data.load import Source, load_table, train_source
from quartet.data.report import Built, Dropped, Report
from quartet.data.samples import Prompt, content_id
from quartet.data.templates import as_messages, check_templates, fill, render
from quartet.data.tokens import encode, map_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def load_prompts(
    data: PromptDataConfig,
    tokenizer: PreTrainedTokenizerFast,
    *,
    max_prompt_tokens: int,
    seed: int,
    source: Source | None = None,
) -> Built[Prompt]:
    """Read, render and tokenise prompts.

    A column `datasource` names where a prompt belongs in evaluation; without it, that is the data
    set's own name when there are several, else "default".

    Args:
        data: Keys and templates.
        tokenizer: The policy's.
        max_prompt_tokens: Longest prompt. A longer one is dropped: cutting it on the left would
            take the instructions away, and nobody would notice.
        seed: Seed of a mix with shares.
        source: What to read; None is what `data` says.

    Raises:
        ConfigError: data set, column or template is missing, or no prompt is usable.
    """
    source = source or train_source(data)
    check_templates(
        tokenizer, apply_chat_template=data.apply_chat_template, input_template=data.input_template
    )
    table = load_table(source, seed=seed)
    table.require(data.input_key, "data.input_key")
    if data.label_key is not None:
        table.require(data.label_key, "data.label_key")
    make = _MakePrompt(tokenizer, data, max_prompt_tokens)
    report = Report(source=source.names, rows=len(table))
    several = len(set(table.datasources)) > 1
    seen: Counter[str] = Counter()
    prompts = []
    rows = map_rows(make, table.rows, num_workers=data.dataloader_num_workers)
    for index, (text, token_ids, label, datasource) in report.kept(rows):
        name = content_id(text, label)
        prompts.append(
            Prompt(
                prompt_id=f"{name}-{seen[name]}",
                text=text,
                token_ids=token_ids,
                label=label,
                datasource=datasource or (table.datasources[index] if several else "default"),
            )
        )
        seen[name] += 1
    return Built(samples=prompts, report=report).require_some(source.field)


@dataclass(frozen=True, slots=True)
class _MakePrompt:
    """Row -> (text, ids, label, datasource), in whichever process."""

    tokenizer: PreTrainedTokenizerFast
    data: PromptDataConfig
    max_prompt_tokens: int

    def __call__(self, row: Mapping[str, Any]) -> tuple[str, tuple[int, ...], Any, str] | Dropped:
        text = self._text(row.get(self.data.input_key))
        if isinstance(text, Dropped):
            return text
        if not text:
            return Dropped("empty_prompt")
        ids = encode(self.tokenizer, text)
        if len(ids) > self.max_prompt_tokens:
            detail = f"{len(ids)} tokens, and at most {self.max_prompt_tokens} leave room to answer"
            return Dropped("prompt_too_long", detail)
        label = row.get(self.data.label_key) if self.data.label_key is not None else ""
        if label is None:
            return Dropped("label_missing", f"{self.data.label_key!r} is null")
        return text, tuple(ids), label, str(row.get("datasource") or "")

    def _text(self, value: Any) -> str | Dropped:
        if self.data.apply_chat_template:
            messages = as_messages(value)
            if isinstance(messages, Dropped):
                return messages
            return render(self.tokenizer, messages, add_generation_prompt=True)
        if not isinstance(value, str):
            return Dropped("not_text", f"a {type(value).__name__}; messages need a chat template")
        return fill(self.data.input_template, value)
