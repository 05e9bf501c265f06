"""A reward function for problems whose answer stands in \\boxed{...}, or is the last number.

    quartet train ppo --reward.remote_url examples/math_reward_func.py --data.label_key answer ...

`queries` are prompt and completion together, `prompts` the prompts, `labels` what the data set says
is right. Called with lists of equal length, which is 1 unless the service was started with a
`--batch_size`. It needs the standard library only.
"""

import re
from fractions import Fraction


def reward_func(queries, prompts, labels, **kwargs) -> dict:
    rewards = []
    boxed = []
    for query, prompt, label in zip(queries, prompts, labels, strict=True):
        response = query[len(prompt) :]
        answer = extract_boxed_answer(response)
        boxed.append(answer is not None)
        if answer is None:
            answer = last_number(response)
        rewards.append(1.0 if is_same(answer, str(label)) else 0.0)
    return {
        "rewards": rewards,
        "scores": rewards,
        "extra_logs": {"math_accuracy": rewards, "has_boxed_answer": boxed},
    }


def extract_boxed_answer(text):
    """Content of the last \\boxed{...}, with its braces balanced; None when there is none."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    begin = start + len("\\boxed{")
    depth = 1
    for end in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[begin:end]
    return None


def last_number(text):
    """The last number of a text, as it is written there; None when there is none."""
    found = re.findall(r"-?\d[\d,]*(?:\.\d+)?(?:/\d+)?", text)
    return found[-1] if found else None


def is_same(answer, label):
    """True when two answers are the same number, or the same text but for blanks and dollars."""
    if answer is None:
        return False
    left, right = as_number(answer), as_number(label)
    if left is not None and right is not None:
        return left == right
    return normal_text(answer) == normal_text(label)


def as_number(text):
    """An exact number: 1,000 and 0.5 and 3/4 and \\frac{3}{4}; None for anything else."""
    plain = normal_text(text).replace(",", "")
    plain = re.sub(r"\\[dt]?frac\{(-?\d+)\}\{(\d+)\}", r"\1/\2", plain)
    try:
        return Fraction(plain)
    except (ValueError, ZeroDivisionError):
        return None


def normal_text(text):
    return re.sub(r"[\s$]|\\[,;!]|\.$", "", text)
