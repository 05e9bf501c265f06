"""The line a person reads after each step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from quartet.trainer.sinks.base import Kind, SampleText

SHOWN = (
    "reward", "score", "return", "kl", "kl_coef", "entropy_loss", "policy_loss", "critic_loss",
    "ppo_clip_ratio", "response_length", "actor_grad_norm", "actor_lr", "gpt_loss", "loss", "acc",
    "chosen_reward", "reject_reward", "grad_norm", "lr", "eval_loss", "acc_mean", "reward_mean",
    "reward_std", "policy_version",
)  # fmt: skip
"""Metrics of the console line, in its order. The files have all of them."""

MAX_TEXT = 160
"""Characters of a sample shown."""


class ConsoleSink:
    """Writes `Global step 3: reward 0.5120, kl 0.0031, ...` and one sample, through `say`."""

    def __init__(self, say: Callable[[str], None]) -> None:
        """Write lines by `say`, so that they do not cut through a progress bar."""
        self._say = say

    def log(self, kind: Kind, step: int, metrics: Mapping[str, float]) -> None:
        """Write the line of one step."""
        names = [n for n in SHOWN if n in metrics]
        names += sorted(
            n for n in metrics if n.startswith(("dropped/", "eval_")) and n not in SHOWN
        )
        text = ", ".join(f"{name} {_short(metrics[name])}" for name in names)
        head = "Global step" if kind == "train" else "Evaluation at step"
        self._say(f"{head} {step}: {text}")

    def texts(self, step: int, samples: Sequence[SampleText]) -> None:
        """Write the first sample, cut to a readable length."""
        if samples:
            first = samples[0]
            text = f"{first.prompt}|{first.completion}".replace("\n", "\\n")
            shown = text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 3] + "..."
            self._say(f"  sample ({first.reward:+.3f}): {shown}")

    def rewind(self, step: int) -> None:
        """What was written was read."""

    def close(self) -> None:
        """Nothing is buffered."""


def _short(value: float) -> str:
    if value == int(value) and abs(value) < 1e6:
        return str(int(value))
    return f"{value:.4f}" if 1e-3 <= abs(value) < 1e4 else f"{value:.2e}"
