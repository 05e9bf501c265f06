"""What every method reads before anything is started."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from quartet.config import PpoConfig, TrainerConfig
from quartet.config.derive import trained_model
from quartet.data import Built, load_tokenizer
from quartet.errors import ConfigError
from quartet.obs.progress import Progress

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Row = TypeVar("Row")


def policy_tokenizer(config: TrainerConfig) -> PreTrainedTokenizerFast:
    """The tokenizer of the model that is trained.

    Raises:
        ConfigError: there is no model, or no tokenizer with it.
    """
    section = "actor" if isinstance(config, PpoConfig) else "model"
    model = trained_model(config)
    if not model:
        raise ConfigError(
            "there is no model to train",
            field=f"{section}.model_name_or_path",
            remedy=f"give --{section}.model_name_or_path",
        )
    template = None
    if not isinstance(config, PpoConfig):
        template = config.data.tokenizer_chat_template
    return load_tokenizer(
        model,
        chat_template=template,
        use_fast=not config.data.disable_fast_tokenizer,
        trust_remote_code=config.ds.trust_remote_code,
    )


def say_report(built: Built[Row], progress: Progress) -> list[Row]:
    """Say what became of the rows of a data set, and hand out its samples."""
    for line in built.report.lines():
        progress.say(line)
    return built.samples
