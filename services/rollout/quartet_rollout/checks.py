"""What every engine refuses of a request, in the same words."""

from __future__ import annotations

from quartet.errors import RequestError
from quartet.types import LogprobKind, PromptGroup


def check_prompt(group: PromptGroup, *, max_length: int, vocabulary: int) -> None:
    """Raise RequestError for a prompt that the model cannot take.

    Args:
        group: Whose prompt it is.
        max_length: Most tokens of prompt and completion together.
        vocabulary: Tokens that the model knows.
    """
    length = len(group.prompt_token_ids)
    if length >= max_length:
        raise RequestError(
            f"the prompt of group {group.group_id} has {length} tokens, and prompt and "
            f"completion together may have {max_length}",
            reason="PROMPT_TOO_LONG",
            field="groups.prompt_token_ids",
            value=str(length),
            remedy=f"give at most {max_length - 1} tokens, or raise data.max_len of the service",
        )
    largest = max(group.prompt_token_ids)
    if largest >= vocabulary:
        raise RequestError(
            f"token {largest} in the prompt of group {group.group_id} is not in the "
            f"vocabulary of {vocabulary}",
            reason="TOKEN_UNKNOWN",
            field="groups.prompt_token_ids",
            value=str(largest),
            remedy="tokenize with the tokenizer of the model that is served",
        )


def check_kind(kind: LogprobKind, kinds: tuple[LogprobKind, ...], *, other: str) -> None:
    """Raise RequestError for log-probabilities that the engine does not report.

    Args:
        kind: Asked for.
        kinds: Reported.
        other: How a service reports the other kind.
    """
    if kind not in kinds:
        raise RequestError(
            f"this engine does not report {kind} log-probabilities",
            reason="LOGPROB_KIND_UNSUPPORTED",
            field="logprob_kind",
            value=str(kind),
            remedy=f"ask for {kinds[0]}, or {other}",
        )
