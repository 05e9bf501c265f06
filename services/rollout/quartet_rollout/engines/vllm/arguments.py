"""From Quartet's flags to vLLM's engine arguments. Imports no vLLM."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import yaml

from quartet.errors import ConfigError
from quartet_rollout.engines.vllm.facts import ModelFacts

if TYPE_CHECKING:
    from quartet.config import RolloutServeConfig

DTYPES: Mapping[str, str] = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
WORKER_EXTENSION = "quartet_rollout.engines.vllm.worker.WeightSwap"

OWN: Mapping[str, str] = {
    "model": "rollout.model_name_or_path",
    "max_model_len": "data.max_len",
    "max_num_seqs": "rollout.max_num_sequences",
    "dtype": "ds.param_dtype",
    "trust_remote_code": "ds.trust_remote_code",
    "tensor_parallel_size": "vllm.tensor_parallel_size",
    "gpu_memory_utilization": "vllm.gpu_memory_utilization",
    "enforce_eager": "vllm.enforce_eager",
    "enable_prefix_caching": "vllm.enable_prefix_caching",
    "enable_sleep_mode": "vllm.enable_sleep",
    "seed": "train.seed",
}
"""Engine arguments that have a flag of their own."""

FIXED = frozenset({"worker_extension_cls", "skip_tokenizer_init", "tokenizer", "task", "runner"})
"""Engine arguments that the service depends on."""

_CPU_CACHE_BYTES = (128 << 20, 4 << 30)
"""Smallest and largest cache that is chosen on a CPU, where vLLM would take all memory."""


def engine_arguments(
    config: RolloutServeConfig, facts: ModelFacts, *, has_gpu: bool, known: Collection[str]
) -> dict[str, Any]:
    """Keyword arguments of vLLM's AsyncEngineArgs.

    Args:
        config: Of the service.
        facts: Of its model.
        has_gpu: False sets what vLLM needs on a CPU.
        known: Names of the arguments that the installed vLLM takes.

    Raises:
        ConfigError: An entry of `vllm.extra` that is no engine argument, or not a free one.
    """
    vllm = config.vllm
    length = min(config.data.max_len, facts.max_positions or config.data.max_len)
    arguments: dict[str, Any] = {
        "model": config.rollout.model_name_or_path,
        "dtype": DTYPES[config.ds.param_dtype],
        "trust_remote_code": config.ds.trust_remote_code,
        "max_model_len": length,
        "max_num_seqs": config.rollout.max_num_sequences,
        "tensor_parallel_size": vllm.tensor_parallel_size,
        # None: wherever vLLM can. Samples of a prompt share it then, and nobody else does.
        "enable_prefix_caching": vllm.enable_prefix_caching or None,
        "enforce_eager": vllm.enforce_eager or not has_gpu,
        "seed": config.train.seed,
        # What was sampled from, so that a learner computes the same numbers.
        "logprobs_mode": "processed_logprobs",
        # Defaults of a model's generation_config.json would change what is sampled.
        "generation_config": "vllm",
        # Token ids in, token ids out.
        "skip_tokenizer_init": True,
        "worker_extension_cls": WORKER_EXTENSION,
        "disable_log_stats": True,
    }
    if has_gpu:
        arguments["gpu_memory_utilization"] = vllm.gpu_memory_utilization
        arguments["enable_sleep_mode"] = vllm.enable_sleep
    else:
        # A share of the memory makes no sense beside learners in the same memory.
        wanted = facts.cache_bytes_per_token * length * config.rollout.max_num_sequences
        smallest, largest = _CPU_CACHE_BYTES
        arguments["kv_cache_memory_bytes"] = min(max(wanted, smallest), largest)
        # The prompt of a request with a seed must fit into one step: vLLM takes back the draw of a
        # part by the offset of its generator. Generators of CPUs have none, and the engine dies.
        arguments["enable_chunked_prefill"] = False
    return {**arguments, **parse_extra(vllm.extra, known)}


def parse_extra(entries: Sequence[str], known: Collection[str]) -> dict[str, Any]:
    """Engine arguments from "key=value" texts; values as in YAML.

    Example:
        >>> parse_extra(["block_size=32"], {"block_size"})
        {'block_size': 32}

    Raises:
        ConfigError: Not of that form, unknown, or set by another flag.
    """
    parsed: dict[str, Any] = {}
    for entry in entries:
        name, equals, value = entry.partition("=")
        name = name.strip().lstrip("-").replace("-", "_")
        if not equals:
            raise _wrong(entry, "is not of the form key=value", "write --vllm.extra block_size=32")
        if name in OWN:
            raise _wrong(entry, f"{name} has a flag of its own", f"use --{OWN[name]}")
        if name in FIXED:
            raise _wrong(entry, f"the service depends on {name}", "leave it out")
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            remedy = f"did you mean {close[0]}?" if close else "see vLLM's engine arguments"
            raise _wrong(entry, f"vLLM has no engine argument {name}", remedy)
        try:
            parsed[name] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise _wrong(entry, f"the value is no YAML: {error}", "quote it") from error
    return parsed


def _wrong(entry: str, why: str, remedy: str) -> ConfigError:
    return ConfigError(f"vllm.extra {entry}: {why}", field="vllm.extra", value=entry, remedy=remedy)
