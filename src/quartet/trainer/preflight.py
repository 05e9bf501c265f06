"""What can be found wrong on this machine before a service is started.

A service would find it too, but after its start, or when all training is done.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from quartet.config import DpoConfig, PpoConfig, TrainerConfig
from quartet.config.derive import needs_critic, needs_ref, trained_model
from quartet.config.modelfolder import CONFIG_FILE
from quartet.config.rewardparts import targets_of
from quartet.config.runnable import length_problems
from quartet.config.tree import wrong

HUB_SECONDS = 10.0
"""Longest wait for the hub's answer to whether it has a model."""


def check_models(config: TrainerConfig) -> None:
    """Find the model of each service that is started here; names on the hub are looked up there.

    Folders were looked at before: see `quartet.config.runnable`.

    Raises:
        ConfigError: a model cannot be found, or does not take sequences of --data.max_len.
    """
    for flag, name in models_on_hub(config):
        for problem in length_problems(config, flag, _from_hub(flag, name)):
            raise problem


def models_on_hub(config: TrainerConfig) -> Iterator[tuple[str, str]]:
    """Flag and name of each model that a service of this machine loads from the hub."""
    found: dict[str, str | None] = {}
    parts: list[str] = []
    if isinstance(config, PpoConfig):
        addresses = [config.learner.address, config.rollout.address]
        addresses += [config.ref.address] if needs_ref(config) else []
        if not all(addresses):
            found["actor.model_name_or_path"] = config.actor.model_name_or_path
        if needs_critic(config) and not config.critic.address:
            found["critic.model_name_or_path"] = config.critic.model_name_or_path
        if not config.reward.address:
            found["reward.model_name_or_path"] = config.reward.model_name_or_path
            parts = targets_of(config.reward.parts, "model")
    else:
        if not config.learner.address:
            found["model.model_name_or_path"] = trained_model(config)
        if isinstance(config, DpoConfig) and not config.ref.address:
            found["ref.model_name_or_path"] = config.ref.model_name_or_path
    for flag, name in (*found.items(), *(("reward.parts", name) for name in parts)):
        if name and not Path(name).expanduser().is_dir():
            yield flag, name


def _from_hub(flag: str, name: str) -> Path:
    """A folder with the model's config.json, from the cache of downloads or downloaded."""
    from huggingface_hub import hf_hub_download, model_info, try_to_load_from_cache

    try:
        cached = try_to_load_from_cache(name, CONFIG_FILE)
        if isinstance(cached, str):
            return Path(cached).parent
        # A download tries for half a minute to reach the hub; this asks once.
        model_info(name, timeout=HUB_SECONDS)
        return Path(hf_hub_download(name, CONFIG_FILE)).parent
    except Exception as error:  # the errors of whichever HTTP client the hub comes with, too
        why = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise wrong(
            flag,
            name,
            f"is no folder, and there is no such model on the Hugging Face hub ({why})",
            "give a folder with config.json, or a hub id that this machine can reach",
        ) from error


def check_outputs(config: TrainerConfig) -> None:
    """Learners started here can write the model and the checkpoints where the flags say.

    Raises:
        ConfigError: a folder cannot be made, or not be written.
    """
    ckpt = config.ckpt
    if config.learner.address:
        # It writes on its own machine.
        return
    _check_folder("ckpt.output_dir", ckpt.output_dir)
    if ckpt.save_steps > 0 or (isinstance(config, PpoConfig) and config.eval.steps > 0):
        _check_folder("ckpt.path", ckpt.path)


def _check_folder(flag: str, folder: str) -> None:
    """Make the folder, write a file there, and take away again what was made."""
    path = Path(folder).expanduser().absolute()
    absent = [p for p in (path, *path.parents) if not os.path.lexists(p)]
    try:
        path.mkdir(parents=True, exist_ok=True)
        # A model is written beside its folder, and then renamed.
        for place in (path, path.parent):
            with tempfile.TemporaryFile(dir=place) as probe:
                probe.write(b"\0")
    except OSError as error:
        raise wrong(
            flag,
            folder,
            f"cannot be written ({error.strerror or error})",
            "give a folder where this user may write",
        ) from error
    finally:
        for made in absent:
            with contextlib.suppress(OSError):
                made.rmdir()
