"""From rows to text: chat templates, and templates with {}."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from quartet.data.report import Dropped
from quartet.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Messages = list[dict[str, Any]]


def check_templates(
    tokenizer: PreTrainedTokenizerFast, *, apply_chat_template: bool, input_template: str | None
) -> None:
    """Refuse templates that cannot work.

    Raises:
        ConfigError: a chat template is wanted and there is none, or {} is missing.
    """
    if apply_chat_template and not tokenizer.chat_template:
        raise ConfigError(
            "--data.apply_chat_template is set, and the tokenizer has no chat template",
            reason="CHAT_TEMPLATE_MISSING",
            field="data.apply_chat_template",
            remedy="use --data.input_template, or a model whose tokenizer has a chat template",
        )
    if not apply_chat_template and input_template is not None and "{}" not in input_template:
        raise ConfigError(
            f"--data.input_template is {input_template!r}, which has no {{}} for the prompt",
            reason="TEMPLATE_WITHOUT_SLOT",
            field="data.input_template",
            value=input_template,
            remedy="put {} where the prompt belongs",
        )


def fill(template: str | None, text: str) -> str:
    r"""Text within a template; `\n` written as two characters, as shells pass it, is a line end."""
    if template is None:
        return text
    before, after = template.replace("\\n", "\n").split("{}", 1)
    return before + text + after


def as_messages(value: Any, *, role: str = "user") -> Messages | Dropped:
    """Messages as they are; a string as one message of `role`."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if not isinstance(value, Sequence) or not value:
        return Dropped("not_messages", f"a {type(value).__name__} is neither text nor messages")
    for message in value:
        if not (isinstance(message, Mapping) and {"role", "content"} <= message.keys()):
            return Dropped("not_messages", "a message needs role and content")
    return [dict(message) for message in value]


def render(
    tokenizer: PreTrainedTokenizerFast, messages: Messages, *, add_generation_prompt: bool
) -> str | Dropped:
    """Text of a conversation; a template that refuses it drops the row."""
    from jinja2 import TemplateError

    try:
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt
        )
    except (TemplateError, TypeError, KeyError) as error:
        return Dropped("template_failed", str(error))
    return str(text)


def answer_spans(
    tokenizer: PreTrainedTokenizerFast, messages: Messages, *, every_turn: bool
) -> tuple[str, list[tuple[int, int]]] | Dropped:
    """Text of a conversation, and where in it the assistant's answers are.

    A span runs from the end of the generation prompt to the end of the answer, its end-of-turn
    mark included and line ends behind that mark excluded. A template that rewrites earlier turns
    when later ones come has no such spans: the row is dropped rather than misaligned.

    Args:
        tokenizer: Its chat template renders.
        messages: The conversation.
        every_turn: Spans of all answers, not of the last alone.
    """
    full = render(tokenizer, messages, add_generation_prompt=False)
    if isinstance(full, Dropped):
        return full
    turns = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    if not every_turn:
        turns = [len(messages) - 1] if len(messages) > 1 else []
    if not turns or turns[0] == 0:
        return Dropped("no_answer", "there is no answer behind a prompt")
    spans = []
    for turn in turns:
        before = render(tokenizer, messages[:turn], add_generation_prompt=True)
        after = render(tokenizer, messages[: turn + 1], add_generation_prompt=False)
        if isinstance(before, Dropped):
            return before
        if isinstance(after, Dropped):
            return after
        end = after.rstrip("\n")
        if not (full.startswith(end) and end.startswith(before)):
            return Dropped("template_rewrites_history", f"message {turn} is not where it was")
        spans.append((len(before), len(end)))
    return full[: spans[-1][1]], spans
