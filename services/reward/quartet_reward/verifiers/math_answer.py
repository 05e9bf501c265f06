"""Is the final answer of a completion equal to the label, as mathematics? 1 or 0.

By the package math-verify, which reads LaTeX and plain expressions and compares them with SymPy. It
limits its own time by SIGALRM, and so needs the main thread of a process: the worker's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from math_verify import parse, verify


def reward_func(
    queries: Sequence[str], prompts: Sequence[str], labels: Sequence[Any], **_: Any
) -> dict[str, Any]:
    """Score completions against their labels.

    Args:
        queries: prompt and completion as one text.
        prompts: the prompts; what is left of a query behind its prompt is judged.
        labels: the right answers: a number, LaTeX or an expression. Plain LaTeX needs no dollars.

    Returns:
        rewards and scores of 0 and 1, and extra_logs `answer_found`: whether an answer could be
        read at all.

    Raises:
        ValueError: a label is missing or is no expression, so nothing can be right.
    """
    results = [
        _judge(query.removeprefix(prompt), label)
        for query, prompt, label in zip(queries, prompts, labels, strict=True)
    ]
    rewards = [float(right) for right, _ in results]
    return {
        "rewards": rewards,
        "scores": rewards,
        "extra_logs": {"answer_found": [float(found) for _, found in results]},
    }


def _judge(completion: str, label: Any) -> tuple[bool, bool]:
    """Whether the answer is right, and whether there is one."""
    expected, answer = _expected(label), parse(completion)
    return bool(answer) and verify(expected, answer), bool(answer)


def _expected(label: Any) -> list[Any]:
    """The label as math-verify reads it."""
    text = str(label).strip() if label is not None else ""
    if not text:
        raise ValueError("there is no label to compare with: give --data.label_key")
    expected = parse(text) or parse(f"${text}$")
    if not expected:
        raise ValueError(f"the label {text!r} is no mathematical expression")
    return expected
