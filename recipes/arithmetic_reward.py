"""Reward of smollm2-135m.yaml: 1 when the last number of the completion is the answer, else 0.

quartet train ppo --reward.remote_url recipes/arithmetic_reward.py --data.label_key answer ...
"""

import re

NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def reward_func(
    queries: list[str], prompts: list[str], labels: list[str], **kwargs: object
) -> dict[str, object]:
    """Judge completions: the text of each query behind its prompt."""
    rewards = []
    for query, prompt, label in zip(queries, prompts, labels, strict=True):
        rewards.append(1.0 if is_right(query[len(prompt) :], label) else 0.0)
    return {
        "rewards": rewards,
        "scores": rewards,
        "extra_logs": {"accuracy": rewards},
    }


def is_right(completion: str, label: str) -> bool:
    """Whether the last number of the completion is the label."""
    numbers = NUMBER.findall(completion)
    return bool(numbers) and float(numbers[-1]) == float(label)
