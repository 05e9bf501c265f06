"""Can this build, on this machine, run a configuration? `--dry-run` reports it, a run requires it.

`quartet.config.validate` asks whether the values fit each other. The line between the two is that a
plan for eight GPUs can be looked at on a laptop.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from quartet.config.derive import (
    engine_gpus,
    num_ranks,
    push_backend,
    shares_gpus,
    split_list,
    trained_model,
)
from quartet.config.kernels import kernel_obstacles
from quartet.config.machine import Machine
from quartet.config.methods import DpoConfig, PpoConfig, TrainerConfig
from quartet.config.modelfolder import CONFIG_FILE, max_positions
from quartet.config.models import RewardSourceFields
from quartet.config.placement import gpus_needed
from quartet.config.rewardparts import targets_of
from quartet.config.serve import (
    LearnerServeConfig,
    RefServeConfig,
    RewardServeConfig,
    RolloutServeConfig,
    ServeConfig,
)
from quartet.config.support import unsupported, wanted_engine
from quartet.config.tree import wrong
from quartet.errors import ConfigError

_MULTI_NODE = (("actor", "learner"), ("critic", "critic"), ("ref", "ref"), ("reward", "reward"))
"""Sections with a number of machines, and whose address stands in for them."""


def obstacles(config: Any, machine: Machine) -> Iterator[ConfigError]:
    """Everything that keeps a configuration from running here and now."""
    yield from unsupported(config)
    if config.ds.param_dtype == "fp16" and machine.num_gpus == 0:
        yield wrong(
            "ds.param_dtype", "fp16", "does not train on a CPU", "set --ds.param_dtype fp32"
        )
    yield from _quantised(config, machine)
    if isinstance(config, ServeConfig) or not config.learner.address:
        yield from kernel_obstacles(config.ds, machine)
    if isinstance(config, ServeConfig):
        yield from _service(config, machine)
        return
    yield from _inputs(config)
    if not config.learner.address:
        yield from _rank_groups(config, machine)
    if isinstance(config, PpoConfig):
        yield from _ppo(config, machine)
    needed = gpus_needed(config, machine)
    if needed > machine.num_gpus:
        yield _too_many_gpus(config, needed, machine)


def require_runnable(config: Any, machine: Machine) -> None:
    """Raise the first of `obstacles`.

    Raises:
        ConfigError: names field, value and remedy.
    """
    for obstacle in obstacles(config, machine):
        raise obstacle


def _rank_groups(config: TrainerConfig, machine: Machine) -> Iterator[ConfigError]:
    """Ring and tensor groups against the ranks that this machine would have."""
    group = config.ds.ring_attn_size * config.ds.tensor_parallel_size
    ranks = num_ranks(config, machine)
    if ranks % group:
        yield wrong(
            "learner.num_ranks",
            ranks,
            f"ring_attn_size x tensor_parallel_size = {group} does not divide it",
            f"add --learner.num_ranks {group}",
        )


def _too_many_gpus(config: TrainerConfig, needed: int, machine: Machine) -> ConfigError:
    name = "actor.num_gpus_per_node" if isinstance(config, PpoConfig) else "learner.num_ranks"
    return wrong(
        name,
        None,
        f"the services that the trainer starts need {needed} GPUs, this machine has "
        f"{machine.num_gpus}",
        "lower the numbers of GPUs, share them with --train.colocate_all, or give addresses of "
        "services elsewhere"
        if isinstance(config, PpoConfig)
        else f"give at most {machine.num_gpus}",
    )


def _quantised(config: Any, machine: Machine) -> Iterator[ConfigError]:
    """Weights in 4 bits, where the learner is started on this machine."""
    if not config.ds.load_in_4bit:
        return
    if isinstance(config, RolloutServeConfig | RefServeConfig | RewardServeConfig):
        yield wrong(
            "ds.load_in_4bit",
            None,
            "quantised weights are for training adapters, and this service trains nothing",
            "leave the flag away",
        )
    elif isinstance(config, LearnerServeConfig) or not config.learner.address:
        if machine.num_gpus == 0:
            yield wrong(
                "ds.load_in_4bit",
                None,
                "weights in 4 bits need a GPU, and there is none here",
                "leave the flag away; --ds.lora.rank works without it",
            )
        elif not machine.has_bitsandbytes:
            yield wrong(
                "ds.load_in_4bit",
                None,
                "the package bitsandbytes is not installed",
                "pip install bitsandbytes, or leave the flag away",
            )


def _ppo(config: PpoConfig, machine: Machine) -> Iterator[ConfigError]:
    for section, addressed in _MULTI_NODE:
        nodes = getattr(config, section).num_nodes
        if nodes > 1 and not getattr(config, addressed).address:
            yield wrong(
                f"{section}.num_nodes",
                nodes,
                "the trainer starts services on its own machine only",
                f"start the service there and give --{addressed}.address",
            )
    if not config.rollout.address:
        yield from _engine(config, machine)
    yield from _push(config, machine)


def _push(config: PpoConfig, machine: Machine) -> Iterator[ConfigError]:
    """The transport against the GPUs; what services elsewhere can, they say themselves."""
    backend, _ = push_backend(config, machine)
    if backend == "nccl" and machine.num_gpus == 0:
        yield wrong("push.backend", "nccl", "there is no GPU here", "take --push.backend gloo")
    elif backend == "nccl" and shares_gpus(config):
        yield wrong(
            "push.backend",
            "nccl",
            "learner and engines share GPUs, and NCCL takes one rank a GPU",
            "leave the flag away, or --train.colocate_all",
        )
    is_elsewhere = config.rollout.address or config.learner.address
    if backend != "ipc" or machine.num_gpus == 0 or is_elsewhere:
        return
    if not shares_gpus(config):
        yield wrong(
            "push.backend",
            "ipc",
            "learner and engine do not share a GPU",
            "add --train.colocate_all, or leave the flag away",
        )
    elif engine_gpus(config) > 1:
        yield wrong(
            "push.backend",
            "ipc",
            f"the engines take {engine_gpus(config)} GPUs, and the weights are on one of them",
            "leave the flag away, or take one engine on one GPU",
        )


def _engine(config: PpoConfig | RolloutServeConfig, machine: Machine) -> Iterator[ConfigError]:
    engine, width = wanted_engine(config, machine), config.vllm.tensor_parallel_size
    python = config.rollout.python if isinstance(config, PpoConfig) else None
    if python and not os.access(python, os.X_OK):
        yield wrong("rollout.python", python, "there is no such program", "check the path")
    elif engine == "vllm" and not machine.has_vllm:
        yield wrong(
            "rollout.engine",
            "vllm",
            f"the package vllm is not installed for {python}"
            if python
            else "the package vllm is not installed beside the trainer",
            "`make setup-vllm` makes an environment with it for CPUs: then add --rollout.python "
            ".venv-vllm/bin/python; or take --rollout.engine transformers",
        )
    if engine != "vllm" and width > 1:
        yield wrong(
            "vllm.tensor_parallel_size",
            width,
            "the engine transformers works on one device"
            if engine == "transformers"
            else "the server that the engine openai asks has its own flags",
            "leave it at 1, or take --rollout.engine vllm on a machine with GPUs",
        )


def _service(config: ServeConfig, machine: Machine) -> Iterator[ConfigError]:
    match config:
        case RolloutServeConfig():
            yield from _model("rollout.model_name_or_path", config.rollout.model_name_or_path)
            yield from _engine(config, machine)
        case RefServeConfig():
            yield from _model("ref.model_name_or_path", config.ref.model_name_or_path)
        case LearnerServeConfig():
            yield from _model("learner.model_name_or_path", config.learner.model_name_or_path)
            ranks = config.learner.num_ranks or 0
            if machine.num_gpus and ranks > machine.num_gpus:
                yield wrong(
                    "learner.num_ranks",
                    ranks,
                    f"each rank needs a GPU, and this machine has {machine.num_gpus}",
                    f"give at most {machine.num_gpus}",
                )
        case RewardServeConfig():
            yield from _model("reward.model_name_or_path", config.reward.model_name_or_path)
            yield from _reward_sources(config.reward)


def _inputs(config: TrainerConfig) -> Iterator[ConfigError]:
    """Folders and files that are named must be there."""
    if isinstance(config, PpoConfig):
        yield from _fit_model(config, "actor.model_name_or_path", trained_model(config))
        if not config.critic.address:
            critic = config.critic.model_name_or_path
            yield from _fit_model(config, "critic.model_name_or_path", critic)
        if not config.reward.address:
            reward = config.reward.model_name_or_path
            yield from _fit_model(config, "reward.model_name_or_path", reward)
            yield from _reward_sources(config.reward)
        if config.train.agent_func_path:
            yield from _user_file(
                "train.agent_func_path",
                config.train.agent_func_path,
                defines="AgentExecutor",
                remedy="define a class AgentExecutor: docs/agents.md",
            )
        yield from _datasets("data.prompt_dataset", config.data.prompt_dataset)
        yield from _datasets("eval.dataset", config.eval.dataset)
        return
    yield from _fit_model(config, "model.model_name_or_path", trained_model(config))
    if isinstance(config, DpoConfig):
        yield from _fit_model(config, "ref.model_name_or_path", config.ref.model_name_or_path)
    yield from _datasets("data.dataset", config.data.dataset)
    yield from _datasets("eval.dataset", config.eval.dataset)


def is_local(name: str) -> bool:
    """True for what can only be a path: hub names have one slash and no leading dot."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or Path(name).exists()


def _fit_model(config: TrainerConfig, flag: str, name: str | None) -> Iterator[ConfigError]:
    """`_model`, and the model takes sequences as long as the data's."""
    yield from _model(flag, name)
    if name:
        yield from length_problems(config, flag, Path(name).expanduser())


def length_problems(config: TrainerConfig, flag: str, folder: Path) -> Iterator[ConfigError]:
    """The error for a model that is given in `flag` and has fewer positions than needed."""
    longest = max_positions(folder)
    if longest is not None and longest < config.data.max_len:
        yield wrong(
            "data.max_len",
            config.data.max_len,
            f"the model of --{flag} takes {longest} tokens",
            f"give at most {longest}",
        )


def _model(flag: str, name: str | None) -> Iterator[ConfigError]:
    if not name or not is_local(name):
        return
    folder = Path(name).expanduser()
    if not folder.is_dir():
        yield wrong(flag, name, "there is no such folder", "check the path")
    elif not (folder / CONFIG_FILE).is_file():
        yield wrong(
            flag,
            name,
            "this folder holds no model: config.json is missing",
            "give the folder that `save_pretrained` or an export wrote",
        )


def _datasets(flag: str, names: str | None) -> Iterator[ConfigError]:
    for name in split_list(names):
        path = name.partition("@")[0]
        suffixed = path.endswith((".jsonl", ".json", ".csv", ".parquet", ".arrow", ".py"))
        if (is_local(path) or suffixed) and not Path(path).expanduser().exists():
            yield wrong(flag, name, "there is no such file or folder", "check the path")


def _reward_sources(source: RewardSourceFields) -> Iterator[ConfigError]:
    """Files, models and packages that rewards come from must be there."""
    if source.remote_url and source.remote_url.endswith(".py"):
        yield from _reward_file("reward.remote_url", source.remote_url)
    for file in targets_of(source.parts, "function"):
        yield from _reward_file("reward.parts", file)
    for model in targets_of(source.parts, "model"):
        yield from _model("reward.parts", model)
    if targets_of(source.parts, "math") and find_spec("math_verify") is None:
        yield wrong(
            "reward.parts",
            "math",
            "the package math-verify is not installed",
            "pip install 'quartet-rlhf[reward]'",
        )


def _reward_file(flag: str, source: str) -> Iterator[ConfigError]:
    """A Python file of rewards must define `reward_func`."""
    yield from _user_file(
        flag,
        source,
        defines="reward_func",
        remedy="define reward_func(queries, prompts, labels, **kwargs)",
    )


def _user_file(flag: str, source: str, *, defines: str, remedy: str) -> Iterator[ConfigError]:
    """A Python file of the user's defines a name. Read, never run, by the trainer."""
    try:
        tree = ast.parse(Path(source).expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        yield wrong(flag, source, f"cannot be read ({error.strerror})", "check the path")
        return
    except (SyntaxError, ValueError) as error:
        yield wrong(flag, source, f"is no Python file ({error})", "correct the file")
        return
    if not _defines(tree, defines):
        yield wrong(flag, source, f"does not define {defines}", remedy)


def _defines(tree: ast.Module, name: str) -> bool:
    """True when a module binds a name outside its functions and classes, or may do so."""
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found = [node.name]
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found = [alias.asname or alias.name for alias in node.names]
        else:
            found = [node.id] if isinstance(node, ast.Name) else []
            waiting.extend(ast.iter_child_nodes(node))
        if name in found or "*" in found:
            return True
    return False
