"""Sections `data` and `eval`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerFields:
    """What trainer and services both need to know about text."""

    max_len: int = 2048
    """Most tokens of a sequence. PPO: prompt and completion together, the engines' context."""
    disable_fast_tokenizer: bool = False
    """Use the slow tokenizer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataFields(TokenizerFields):
    """What all data sets have in common."""

    max_samples: int = 1_000_000
    """Most samples taken, of each data set and of all together."""
    input_template: str | None = None
    r"""Text around the prompt, with {} in its place, for example 'User: {}\nAssistant: '."""
    apply_chat_template: bool = False
    """Render messages with the tokenizer's chat template."""
    dataloader_num_workers: int = 0
    """Processes that tokenize; 0 does it in the trainer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OfflineDataFields(DataFields):
    """Data sets of answers: SFT, RM, DPO."""

    dataset: str | None = None
    """Data sets, several with commas: a file (.jsonl .json .csv .parquet .arrow), a folder, a
    name on the hub, each also as path@folder."""
    dataset_probs: str | None = None
    """Shares of the data sets in the mix, with commas. None: one after the other."""
    dataset_split: str = "train"
    """Split to train on."""
    tokenizer_chat_template: str | None = None
    """Chat template, in place of the tokenizer's own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SftDataConfig(OfflineDataFields):
    """Data of supervised fine-tuning."""

    input_template: str | None = "User: {}\nAssistant: "
    r"""Text around the prompt, with {} in its place. Not used with a chat template."""
    input_key: str = "input"
    """Column of the prompt or the messages."""
    output_key: str | None = None
    """Column of the answer. None: the last message of `input_key` is the answer."""
    multiturn: bool = False
    """Train on every answer of a conversation, not on the last alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PreferenceDataConfig(OfflineDataFields):
    """Pairs of a better and a worse answer: RM and DPO."""

    max_len: int = 512
    """Most tokens of prompt and answer together."""
    prompt_key: str | None = None
    """Column of the prompt. None: the answers carry it."""
    chosen_key: str = "chosen"
    """Column of the better answer."""
    rejected_key: str = "rejected"
    """Column of the worse answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptDataConfig(DataFields):
    """Prompts of PPO."""

    max_samples: int = 100_000_000
    """Most prompts taken, of each data set and of all together."""
    prompt_dataset: str | None = None
    """Data sets of prompts, several with commas; forms as for `data.dataset` of SFT."""
    prompt_probs: str | None = None
    """Shares of the data sets in the mix, with commas. None: one after the other."""
    prompt_split: str = "train"
    """Split to take prompts from."""
    input_key: str = "input"
    """Column of the prompt or the messages."""
    label_key: str | None = None
    """Column of the label that reward functions get; without one they get ''."""
    image_key: str = "images"
    """Column of the images."""
    max_images_per_prompt: int = 0
    """Most images of a prompt; 0 is a model of text alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalConfig:
    """Evaluation during training."""

    steps: int = -1
    """Evaluate each N steps. -1: SFT, RM, DPO once per epoch; PPO never."""
    dataset: str | None = None
    """Data sets to evaluate on, several with commas."""
    split: str = "train"
    """Split to evaluate on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DpoEvalConfig(EvalConfig):
    """Evaluation of DPO."""

    split: str = "test"
    """Split to evaluate on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PpoEvalConfig(EvalConfig):
    """Evaluation of PPO: completions are sampled and scored."""

    temperature: float = 0.6
    """Sampling temperature."""
    n_samples_per_prompt: int = 4
    """Completions of each prompt."""
