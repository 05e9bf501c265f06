"""Data sets, templates and the models they are for."""

from __future__ import annotations

from collections.abc import Iterator

from quartet.config.data import DataFields
from quartet.config.derive import split_list, trained_model
from quartet.config.methods import DpoConfig, PpoConfig, RmConfig, SftConfig, TrainerConfig
from quartet.config.tree import wrong
from quartet.errors import ConfigError


def check_model(config: TrainerConfig) -> Iterator[ConfigError]:
    """There is a model to train."""
    name = "actor" if isinstance(config, PpoConfig) else "model"
    if not trained_model(config):
        yield wrong(
            f"{name}.model_name_or_path",
            None,
            "there is no model to train",
            f"give --{name}.model_name_or_path a folder or a name on the hub",
        )


def check_datasets(config: TrainerConfig) -> Iterator[ConfigError]:
    """There is data, and its shares fit."""
    if isinstance(config, PpoConfig):
        name, probs = "data.prompt_dataset", "data.prompt_probs"
        sets, shares = config.data.prompt_dataset, config.data.prompt_probs
    else:
        name, probs = "data.dataset", "data.dataset_probs"
        sets, shares = config.data.dataset, config.data.dataset_probs
    if not split_list(sets):
        yield wrong(
            name,
            None,
            "there is no data",
            f"give --{name} a file, a folder or a name on the hub",
        )
    if shares is not None:
        yield from _check_shares(probs, shares, len(split_list(sets)))
    yield from _check_template(config.data)


def _check_shares(name: str, text: str, count: int) -> Iterator[ConfigError]:
    try:
        shares = [float(share) for share in split_list(text)]
    except ValueError:
        yield wrong(name, text, "these are no numbers", "give shares with commas, such as 0.7,0.3")
        return
    if len(shares) != count:
        yield wrong(
            name,
            text,
            f"there are {len(shares)} shares for {count} data sets",
            "give one share for each data set",
        )
    elif not (all(share >= 0 for share in shares) and abs(sum(shares) - 1) < 1e-6):
        yield wrong(
            name,
            text,
            f"the shares add up to {sum(shares):g}",
            "give shares of at least 0 that add up to 1",
        )


def _check_template(data: DataFields) -> Iterator[ConfigError]:
    template = data.input_template
    if template is None or data.apply_chat_template:
        return
    if "{}" not in template:
        yield wrong(
            "data.input_template",
            repr(template),
            "has no {} where the prompt goes",
            r"write for example $'User: {}\nAssistant: '",
        )
    if r"\n" in template:
        yield wrong(
            "data.input_template",
            repr(template),
            "has a backslash and an n where a new line is meant",
            r"write $'User: {}\nAssistant: ' in the shell, with the dollar sign",
        )


def check_sft(config: SftConfig) -> Iterator[ConfigError]:
    """Which part of a sample is the answer."""
    data, pretrain = config.data, config.model.pretrain_mode_enable
    if data.multiturn and not data.apply_chat_template:
        yield wrong(
            "data.multiturn",
            None,
            "turns are known from the chat template",
            "add --data.apply_chat_template",
        )
    if data.multiturn and pretrain:
        yield wrong(
            "data.multiturn",
            None,
            "raw text has no turns",
            "leave it away, or --model.pretrain_mode_enable",
        )
    if data.output_key is None and not data.apply_chat_template and not pretrain:
        yield wrong(
            "data.output_key",
            None,
            "nothing says which text is the answer, so every sample would be empty",
            "give --data.output_key, or --data.apply_chat_template, or "
            "--model.pretrain_mode_enable",
        )


def check_rm(config: RmConfig) -> Iterator[ConfigError]:
    """The pairwise loss."""
    if config.model.loss_type not in ("sigmoid", "logexp"):
        yield wrong(
            "model.loss_type", config.model.loss_type, "is no loss", "take sigmoid or logexp"
        )
    elif config.model.margin_loss_enable and config.model.loss_type != "sigmoid":
        yield wrong(
            "model.margin_loss_enable",
            None,
            "only the sigmoid loss has a margin",
            "set --model.loss_type sigmoid",
        )


def check_dpo(config: DpoConfig) -> Iterator[ConfigError]:
    """The preference loss."""
    if config.model.ipo_enable and config.model.label_smoothing:
        yield wrong(
            "model.label_smoothing",
            config.model.label_smoothing,
            "the IPO loss has no label smoothing",
            "leave it away, or --model.ipo_enable",
        )
